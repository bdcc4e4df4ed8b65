/* Resampling of 8-bit pixels: sums of weighted levels, rounded half up, within 0 to 255.

   In: rows of pixels and weights of 22 bits. Out: rows of pixels, equal to Pillow's. With AVX2 two products
   of 16 bits take the place of one of 32: a weight's upper and lower bits are summed apart. */
#include <string.h>

#include "region.h"

/* Sums wrap where they leave 32 bits, as they do in registers. */
static uint8_t to_level(uint32_t sum) {
    int32_t level = (int32_t)sum >> WEIGHT_BITS;
    return (uint8_t)(level < 0 ? 0 : level > 255 ? 255 : level);
}

static void copy_across(const uint8_t *row, int bands, const line_weights *w, uint8_t *target) {
    if (bands == 4)
        for (int i = 0; i < w->size; i++) /* the fourth byte is the next pixel's first */
            memcpy(target + 3 * i, row + (ptrdiff_t)w->start[i] * 4, 4);
    else
        for (int i = 0; i < w->size; i++)
            target[i] = row[w->start[i]];
}

static void across(const uint8_t *row, int bands, const line_weights *w, uint8_t *target) {
    int kept = bands == 4 ? 3 : bands, taps = 2 * w->pairs;
    for (int i = 0; i < w->size; i++, target += kept) {
        const uint8_t *pixel = row + (ptrdiff_t)w->start[i] * bands;
        const int32_t *weight = w->whole + (ptrdiff_t)i * taps;
        for (int band = 0; band < kept; band++) {
            uint32_t sum = 1 << (WEIGHT_BITS - 1);
            for (int t = 0; t < taps; t++)
                sum += pixel[t * bands + band] * (uint32_t)weight[t];
            target[band] = to_level(sum);
        }
    }
}

/* The row of a tap. A last tap without weight would lie beyond the last row. */
static const uint8_t *tap_row(const uint8_t *source, size_t stride, const line_weights *w, int i,
                              int tap) {
    int row = w->start[i] + tap;
    return source + (size_t)((row < w->end ? row : w->end - 1) - w->first) * stride;
}

static void down(const uint8_t *source, size_t stride, int bytes, const line_weights *w,
                 uint8_t *target) {
    enum { PIECE = 512 };
    uint32_t sums[PIECE];
    for (int i = 0; i < w->size; i++, target += bytes)
        for (int from = 0; from < bytes; from += PIECE) {
            int count = bytes - from < PIECE ? bytes - from : PIECE;
            for (int x = 0; x < count; x++)
                sums[x] = 1 << (WEIGHT_BITS - 1);
            for (int t = 0; t < 2 * w->pairs; t++) {
                const uint8_t *row = tap_row(source, stride, w, i, t) + from;
                uint32_t weight = (uint32_t)w->whole[(ptrdiff_t)i * 2 * w->pairs + t];
                for (int x = 0; x < count; x++)
                    sums[x] += row[x] * weight;
            }
            for (int x = 0; x < count; x++)
                target[from + x] = to_level(sums[x]);
        }
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(REGION_PORTABLE)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#define INLINE static inline __attribute__((always_inline)) AVX2

INLINE __m256i rounded(__m256i high, __m256i low) {
    __m256i half = _mm256_set1_epi32(1 << (WEIGHT_BITS - 1));
    __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(high, LOW_BITS), low);
    return _mm256_srai_epi32(_mm256_add_epi32(sum, half), WEIGHT_BITS);
}

/* Two rows at once, one in each half of a register, since they share their weights. */
INLINE void across_two(const uint8_t *a, const uint8_t *b, const line_weights *w, int pairs,
                       uint8_t *target_a, uint8_t *target_b) {
    /* Two pixels r g b x become 16-bit r r g g b b x x, as a pair of weights wants them. */
    const __m256i spread = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1));
    const int32_t *high_weight = w->high, *low_weight = w->low;
    for (int i = 0; i < w->size; i++) {
        ptrdiff_t at = (ptrdiff_t)w->start[i] * 4;
        __m256i high = _mm256_setzero_si256(), low = high;
        for (int j = 0; j < pairs; j++, at += 8) {
            __m128i first = _mm_loadl_epi64((const __m128i *)(const void *)(a + at));
            __m128i second = _mm_loadl_epi64((const __m128i *)(const void *)(b + at));
            __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
            both = _mm256_shuffle_epi8(both, spread);
            high = _mm256_add_epi32(
                high, _mm256_madd_epi16(both, _mm256_set1_epi32(*high_weight++)));
            low = _mm256_add_epi32(low, _mm256_madd_epi16(both, _mm256_set1_epi32(*low_weight++)));
        }
        __m256i levels = rounded(high, low);
        levels = _mm256_packs_epi32(levels, levels);
        levels = _mm256_packus_epi16(levels, levels);
        int32_t pixel = _mm256_extract_epi32(levels, 0);
        memcpy(target_a + 3 * i, &pixel, 4);
        pixel = _mm256_extract_epi32(levels, 4);
        memcpy(target_b + 3 * i, &pixel, 4);
    }
}

/* The usual counts of taps are constants, so that their loops vanish. */
AVX2 static void across_avx2(const uint8_t *a, const uint8_t *b, const line_weights *w,
                             uint8_t *target_a, uint8_t *target_b) {
    switch (w->pairs) {
    case 1: across_two(a, b, w, 1, target_a, target_b); break;
    case 2: across_two(a, b, w, 2, target_a, target_b); break;
    case 3: across_two(a, b, w, 3, target_a, target_b); break;
    default: across_two(a, b, w, w->pairs, target_a, target_b);
    }
}

INLINE __m256i down_32(const uint8_t *source, size_t stride, const line_weights *w, int i) {
    const __m256i zero = _mm256_setzero_si256();
    __m256i high[4] = {zero, zero, zero, zero}, low[4] = {zero, zero, zero, zero};
    for (int j = 0; j < w->pairs; j++) {
        ptrdiff_t word = (ptrdiff_t)i * w->pairs + j;
        __m256i high_weight = _mm256_set1_epi32(w->high[word]);
        __m256i low_weight = _mm256_set1_epi32(w->low[word]);
        const void *row_a = tap_row(source, stride, w, i, 2 * j);
        const void *row_b = tap_row(source, stride, w, i, 2 * j + 1);
        __m256i a = _mm256_loadu_si256(row_a), b = _mm256_loadu_si256(row_b);
        __m256i front = _mm256_unpacklo_epi8(a, b), back = _mm256_unpackhi_epi8(a, b);
        __m256i part[4] = {
            _mm256_unpacklo_epi8(front, zero), _mm256_unpackhi_epi8(front, zero),
            _mm256_unpacklo_epi8(back, zero), _mm256_unpackhi_epi8(back, zero)};
        for (int p = 0; p < 4; p++) {
            high[p] = _mm256_add_epi32(high[p], _mm256_madd_epi16(part[p], high_weight));
            low[p] = _mm256_add_epi32(low[p], _mm256_madd_epi16(part[p], low_weight));
        }
    }
    for (int p = 0; p < 4; p++)
        high[p] = rounded(high[p], low[p]);
    return _mm256_packus_epi16(
        _mm256_packs_epi32(high[0], high[1]), _mm256_packs_epi32(high[2], high[3]));
}

AVX2 static void down_avx2(const uint8_t *source, size_t stride, int bytes, const line_weights *w,
                           uint8_t *target) {
    for (int i = 0; i < w->size; i++, target += bytes) {
        int x = 0;
        for (; x + 32 <= bytes; x += 32)
            _mm256_storeu_si256((void *)(target + x), down_32(source + x, stride, w, i));
        if (x < bytes) {
            uint8_t rest[32];
            _mm256_storeu_si256((void *)rest, down_32(source + x, stride, w, i));
            memcpy(target + x, rest, (size_t)(bytes - x));
        }
    }
}

static int has_avx2(void) { return __builtin_cpu_supports("avx2"); }
#else
static int has_avx2(void) { return 0; }
#define across_avx2(a, b, w, target_a, target_b) ((void)0)
#define down_avx2(source, stride, bytes, w, target) ((void)0)
#endif

void resample_across(const uint8_t *const *rows, int count, int bands, const line_weights *w,
                     uint8_t *const *targets) {
    int row = 0, last = count - 1;
    if (w->copies)
        for (; row < count; row++)
            copy_across(rows[row], bands, w, targets[row]);
    else if (bands == 4 && has_avx2())
        for (; row < count; row += 2) { /* an odd row is done twice, to the same place */
            int other = row < last ? row + 1 : last;
            across_avx2(rows[row], rows[other], w, targets[row], targets[other]);
        }
    for (; row < count; row++)
        across(rows[row], bands, w, targets[row]);
}

void resample_down(const uint8_t *source, size_t stride, int bytes, const line_weights *w,
                   uint8_t *target) {
    if (w->copies)
        for (int i = 0; i < w->size; i++)
            memcpy(target + (ptrdiff_t)i * bytes, tap_row(source, stride, w, i, 0), (size_t)bytes);
    else if (has_avx2())
        down_avx2(source, stride, bytes, w, target);
    else
        down(source, stride, bytes, w, target);
}
