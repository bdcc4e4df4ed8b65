/* From the rows of a box to the square: the two passes, in either order.

   In: where the rows come from, and what is wanted. Out: size x size x channels bytes in `out`. */
#include <string.h>

#include "state.h"

enum { GROUP = 8 };           /* rows decoded before they are resampled, while they are in the cache */

/* Pillow's luma, in place: a row of RGBX becomes one of grey. */
static void to_grey(uint8_t *row, int columns) {
    for (int x = 0; x < columns; x++) {
        const uint8_t *p = row + 4 * x;
        row[x] = (uint8_t)((p[0] * 19595u + p[1] * 38470u + p[2] * 7471u + 0x8000u) >> 16);
    }
}

static void read_rows(region *self, const work *w, int first, int count, uint8_t **rows) {
    w->decode_rows(self, w, first, count, rows);
    if (w->bands != w->decoded_bands)
        for (int i = 0; i < count; i++)
            to_grey(rows[i], w->columns);
}

/* A finished line into the result: as it is, or grey three times. */
static void put_line(const work *w, const uint8_t *line, uint8_t *out) {
    if (w->channels == 1 || w->bands == 4)
        memcpy(out, line, (size_t)w->size * (size_t)w->channels);
    else
        for (int x = 0; x < w->size; x++)
            out[3 * x] = out[3 * x + 1] = out[3 * x + 2] = line[x];
}

/* Each row is brought to the result's width as it comes; then all to its height. */
static int across_then_down(region *self, const work *w, uint8_t *out) {
    int kept = w->bands == 4 ? 3 : 1, bytes = w->size * kept;
    size_t stride = ((size_t)bytes + 1 + 31) / 32 * 32;
    if (!hold(&self->decoded, GROUP * w->row_bytes) ||
        !hold(&self->between, (size_t)w->rows * stride) ||
        !hold(&self->lines, (size_t)w->size * (size_t)bytes))
        return REGION_NO_MEMORY;
    uint8_t *decoded[GROUP], *targets[GROUP];
    for (int done = 0; done < w->rows; done += GROUP) {
        int group = w->rows - done < GROUP ? w->rows - done : GROUP;
        for (int i = 0; i < group; i++) {
            decoded[i] = self->decoded.bytes + (size_t)i * w->row_bytes;
            targets[i] = self->between.bytes + (size_t)(done + i) * stride;
        }
        read_rows(self, w, done, group, decoded);
        resample_across(
            (const uint8_t *const *)decoded, group, w->bands, &self->across, targets);
    }
    if (kept == w->channels) {
        resample_down(self->between.bytes, stride, bytes, &self->down, out);
        return REGION_DONE;
    }
    resample_down(self->between.bytes, stride, bytes, &self->down, self->lines.bytes);
    for (int y = 0; y < w->size; y++)
        put_line(w, self->lines.bytes + (size_t)y * (size_t)bytes,
                 out + (size_t)y * (size_t)w->size * (size_t)w->channels);
    return REGION_DONE;
}

/* As Pillow does from version 13 on where the height shrinks much more than the width. */
static int down_then_across(region *self, const work *w, uint8_t *out) {
    int bytes = w->columns * w->bands;
    size_t beyond = w->row_bytes - (size_t)bytes, line = ((size_t)w->size * 3 + 1 + 31) / 32 * 32;
    if (!hold(&self->decoded, (size_t)w->rows * w->row_bytes) ||
        !hold(&self->between, (size_t)w->size * (size_t)bytes + beyond) ||
        !hold(&self->lines, GROUP * line))
        return REGION_NO_MEMORY;
    uint8_t *decoded[GROUP], *targets[GROUP];
    for (int done = 0; done < w->rows; done += GROUP) {
        int group = w->rows - done < GROUP ? w->rows - done : GROUP;
        for (int i = 0; i < group; i++)
            decoded[i] = self->decoded.bytes + (size_t)(done + i) * w->row_bytes;
        read_rows(self, w, done, group, decoded);
    }
    resample_down(self->decoded.bytes, w->row_bytes, bytes, &self->down, self->between.bytes);
    for (int done = 0; done < w->size; done += GROUP) {
        int group = w->size - done < GROUP ? w->size - done : GROUP;
        for (int i = 0; i < group; i++) {
            decoded[i] = self->between.bytes + (size_t)(done + i) * (size_t)bytes;
            targets[i] = self->lines.bytes + (size_t)i * line;
        }
        resample_across(
            (const uint8_t *const *)decoded, group, w->bands, &self->across, targets);
        for (int i = 0; i < group; i++)
            put_line(w, targets[i],
                     out + (size_t)(done + i) * (size_t)w->size * (size_t)w->channels);
    }
    return REGION_DONE;
}

int weigh_box(region *self, int width, int height, const float box[4], int flip, int size,
              int filter) {
    int outcome = make_weights(&self->across, width, box[0], box[2], size, filter);
    if (outcome == REGION_DONE)
        outcome = make_weights(&self->down, height, box[1], box[3], size, filter);
    if (outcome == REGION_DONE && flip)
        mirror_weights(&self->across);
    return outcome;
}

int fill_square(region *self, work *w, uint8_t *out) {
    for (int i = 0; i < self->across.size; i++)
        self->across.start[i] -= w->first_column;
    w->bands = w->channels == 1 ? 1 : w->decoded_bands;
    w->rows = self->down.end - self->down.first;
    w->row_bytes = ((size_t)w->columns + 2 * (size_t)self->across.pairs) * (size_t)w->decoded_bands;
    w->row_bytes = (w->row_bytes + 63) / 64 * 64;
    return w->down_first ? down_then_across(self, w, out) : across_then_down(self, w, out);
}
