/* A box of an image in memory as a square of pixels: JPEGs that a cache keeps decoded.

   In: pixels, height x width x bands, and what region_prepare takes. Out: the square that region_prepare
   gives for a file of these pixels. Only the rows and columns that the box needs are read. */
#include <string.h>

#include "state.h"

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
