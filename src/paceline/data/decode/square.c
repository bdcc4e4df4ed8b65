/* From the rows of a box to a square of pixels: two resampling passes, in either order.

   The rows come from libjpeg (region.c) or, for images that are already decoded, from memory
   (`region_square_of_pixels`). The result has size x size x channels bytes. */
#include <stdlib.h>
#include <string.h>

#include "region.h"

enum { KEPT_BYTES = 1 << 24 }; /* more than this is not kept for the next image */

void release(buffer *b) {
    free(b->bytes);
    b->bytes = NULL;
    b->capacity = 0;
}

/* New memory is zero: what lies beyond a row is read, though with no weight. */
static int hold(buffer *b, size_t bytes) {
    if (bytes <= b->capacity)
        return 1;
    release(b);
    b->bytes = calloc(bytes, 1);
    b->capacity = b->bytes ? bytes : 0;
    return b->bytes != NULL;
}

void release_what_is_large(region *self) {
    buffer *buffers[] = {&self->decoded, &self->between, &self->lines};
    for (int i = 0; i < 3; i++)
        if (buffers[i]->capacity > KEPT_BYTES)
            release(buffers[i]);
    if (self->across.capacity > KEPT_BYTES)
        free_weights(&self->across);
    if (self->down.capacity > KEPT_BYTES)
        free_weights(&self->down);
}

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

#if defined(__x86_64__) && defined(__GNUC__) && !defined(REGION_PORTABLE)
#include <immintrin.h>

/* Four pixels at a time, for which sixteen bytes are read: the last of a row stay undone. */
__attribute__((target("ssse3"))) static int widen_fours(const uint8_t *from, int columns, uint8_t *to) {
    const __m128i spread = _mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1);
    int x = 0;
    for (; x + 6 <= columns; x += 4) {
        __m128i four = _mm_loadu_si128((const void *)(from + 3 * x));
        _mm_storeu_si128((void *)(to + 4 * x), _mm_shuffle_epi8(four, spread));
    }
    return x;
}

static int has_ssse3(void) { return __builtin_cpu_supports("ssse3"); }
#else
static int has_ssse3(void) { return 0; }
#define widen_fours(from, columns, to) 0
#endif

/* RGB becomes RGBX, as libjpeg gives it. */
static void widen(const uint8_t *from, int columns, uint8_t *to) {
    for (int x = has_ssse3() ? widen_fours(from, columns, to) : 0; x < columns; x++) {
        memcpy(to + 4 * x, from + 3 * x, 3);
        to[4 * x + 3] = 0;
    }
}

/* Copied though they lie there: more is read of a row than there is in the last one. */
static void take_rows(region *self, const work *w, int first, int count, uint8_t **rows) {
    (void)self;
    for (int i = 0; i < count; i++) {
        const uint8_t *row = w->pixels + (size_t)(first + i) * w->stride;
        if (w->decoded_bands == 4)
            widen(row, w->columns, rows[i]);
        else
            memcpy(rows[i], row, (size_t)w->columns);
    }
}

int region_square_of_pixels(region *self, const uint8_t *pixels, int width, int height, int bands,
                            float left, float top, float right, float bottom, int flip, int size,
                            int filter, int down_first, int channels, uint8_t *out) {
    if (!self || !pixels || !out || (bands != 1 && bands != 3) || (channels != 1 && channels != 3))
        return REGION_BAD_ARGUMENT;
    if (size < 1 || size > JPEG_MAX_DIMENSION || width < 1 || height < 1)
        return REGION_BAD_ARGUMENT;
    /* As for files. Beyond, whole numbers would no longer hold what they count. */
    if (width > JPEG_MAX_DIMENSION || height > JPEG_MAX_DIMENSION ||
        (int64_t)width * height > REGION_MAX_PIXELS)
        return REGION_NOT_OURS;
    const float box[] = {left, top, right, bottom};
    int outcome = weigh_box(self, width, height, box, flip, size, filter);
    if (outcome == REGION_DONE) {
        work w = {.size = size, .channels = channels, .down_first = down_first};
        w.decode_rows = take_rows;
        w.decoded_bands = bands == 1 ? 1 : 4;
        w.first_column = self->across.first;
        w.columns = self->across.end - self->across.first;
        w.stride = (size_t)width * (size_t)bands;
        w.pixels = pixels + (size_t)self->down.first * w.stride;
        w.pixels += (size_t)w.first_column * (size_t)bands;
        outcome = fill_square(self, &w, out);
    }
    release_what_is_large(self);
    return outcome;
}
