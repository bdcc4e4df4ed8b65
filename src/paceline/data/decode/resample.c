/* Resampling of 8-bit pixels, equal to Pillow's.

   `make_weights` computes how much each stored pixel adds to each pixel of the result, in whole multiples of 2^-22.
   The arithmetic is Pillow's step by step, floats and doubles included: another order of operations would change a
   weight by one, and a pixel with it. `resample_across` and `resample_down` sum weighted levels, rounded half up,
   clamped to 0..255. With AVX2, two 16-bit products replace one 32-bit product: the upper and lower bits of a weight
   are summed separately. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "region.h"

static double triangle(double x) {
    x = fabs(x);
    return x < 1.0 ? 1.0 - x : 0.0;
}

/* Keys's cubic with a = -1/2. */
static double cubic(double x) {
    const double a = -0.5;
    x = fabs(x);
    if (x < 1.0)
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
    if (x < 2.0)
        return (((x - 5) * x + 8) * x - 4) * a;
    return 0.0;
}

static double sinc(double x) {
    if (x == 0.0)
        return 1.0;
    x *= 3.14159265358979323846;
    return sin(x) / x;
}

static double lanczos(double x) {
    return -3.0 <= x && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0;
}

typedef struct {
    double (*weight)(double);
    double support;
} filter_shape;

static const filter_shape SHAPES[] = {{NULL, 0}, {triangle, 1}, {cubic, 2}, {lanczos, 3}};

/* Room for `size` pixels of `taps` each, in one piece that the next image uses again. */
static int make_room(line_weights *w, int size, int taps) {
    w->size = size;
    w->pairs = (taps + 1) / 2;
    size_t words = (size_t)size * (size_t)w->pairs;
    size_t bytes = ((size_t)size + 4 * words) * sizeof(int32_t);
    if (bytes > w->capacity) {
        free_weights(w);
        w->memory = malloc(bytes);
        if (!w->memory)
            return 0;
        w->capacity = bytes;
    }
    memset(w->memory, 0, bytes);
    w->start = w->memory;
    w->high = w->start + size;
    w->low = w->high + words;
    w->whole = w->low + words;
    return 1;
}

/* False where the upper half does not fit into 16 bits: no filter of ours gets there. */
static int set_weight(line_weights *w, int pixel, int tap, int32_t value) {
    int32_t high = value >> LOW_BITS, low = value & ((1 << LOW_BITS) - 1);
    size_t word = (size_t)pixel * (size_t)w->pairs + (size_t)(tap / 2);
    int shift = tap % 2 * 16;
    if (high < INT16_MIN || high > INT16_MAX)
        return 0;
    w->whole[2 * word + (size_t)(tap % 2)] = value;
    w->high[word] = (int32_t)((uint32_t)w->high[word] | ((uint32_t)high & 0xFFFF) << shift);
    w->low[word] |= low << shift;
    return 1;
}

/* Pillow adds up steps; where a centre falls between two pixels its rounding errors decide. */
static int make_nearest(line_weights *w, int stored, double begin, double step, int size) {
    if (!make_room(w, size, 1))
        return REGION_NO_MEMORY;
    double centre = begin + step * 0.5;
    for (int i = 0; i < size; i++, centre += step) {
        if (!(centre >= 0.0 && centre < stored))
            return REGION_BAD_ARGUMENT;
        w->start[i] = (int32_t)centre;
        set_weight(w, i, 0, 1 << WEIGHT_BITS);
    }
    w->first = w->start[0];
    w->end = w->start[size - 1] + 1;
    w->copies = 1;
    return REGION_DONE;
}

/* Of a part that is neither stretched nor shifted, pixels are copied. */
static void find_copies(line_weights *w) {
    int taps = 2 * w->pairs;
    w->copies = 0;
    for (int i = 0; i < w->size; i++) {
        const int32_t *weight = w->whole + (ptrdiff_t)i * taps;
        int nonzero = 0, whole = 0;
        for (int t = 0; t < taps; t++) {
            nonzero += weight[t] != 0;
            whole += weight[t] == 1 << WEIGHT_BITS;
        }
        if (nonzero != 1 || whole != 1)
            return;
    }
    w->copies = 1;
    for (int i = 0; i < w->size; i++)
        for (int t = 0; w->whole[(ptrdiff_t)i * taps + t] == 0; t++)
            w->start[i]++;
}

/* The pixels that the filter reaches around a centre. */
static void reached(double centre, double reach, int stored, int *from, int *to) {
    *from = (int)(centre - reach + 0.5);
    *to = (int)(centre + reach + 0.5);
    *from = *from < 0 ? 0 : *from;
    *to = *to > stored ? stored : *to;
}

int make_weights(line_weights *w, int stored, float begin, float end, int size, int filter) {
    if (!(0 <= begin && begin < end && end <= (float)stored) || size < 1 || filter < 0 || filter > 3)
        return REGION_BAD_ARGUMENT;
    double step = (double)(end - begin) / size;
    if (filter == FILTER_NEAREST)
        return make_nearest(w, stored, begin, step, size);
    /* When shrinking, the filter grows with the step, so that each stored pixel counts. */
    double widening = step < 1.0 ? 1.0 : step, narrowing = 1.0 / widening;
    double reach = SHAPES[filter].support * widening;
    int most = 1, fits = 1, from, to;
    for (int i = 0; i < size; i++) {
        reached(begin + (i + 0.5) * step, reach, stored, &from, &to);
        most = to - from > most ? to - from : most;
    }
    double *line = malloc((size_t)most * sizeof *line);
    if (!line || !make_room(w, size, most)) {
        free(line);
        return REGION_NO_MEMORY;
    }
    for (int i = 0; i < size; i++) {
        double centre = begin + (i + 0.5) * step, sum = 0.0;
        reached(centre, reach, stored, &from, &to);
        int taps = to - from;
        for (int t = 0; t < taps; t++) {
            line[t] = SHAPES[filter].weight((t + from - centre + 0.5) * narrowing);
            sum += line[t];
        }
        for (int t = 0; t < taps; t++) {
            double share = (sum != 0.0 ? line[t] / sum : line[t]) * (1 << WEIGHT_BITS);
            fits &= fabs(share) < 1 << 26;
            fits = fits && set_weight(w, i, t, (int32_t)(share < 0 ? share - 0.5 : share + 0.5));
        }
        w->start[i] = from;
        w->end = to;
    }
    w->first = w->start[0];
    free(line);
    find_copies(w);
    return fits ? REGION_DONE : REGION_BAD_ARGUMENT;
}

static void reverse(int32_t *words, int count, int width) {
    for (int low = 0, high = count - 1; low < high; low++, high--)
        for (int i = 0; i < width; i++) {
            int32_t kept = words[low * width + i];
            words[low * width + i] = words[high * width + i];
            words[high * width + i] = kept;
        }
}

void mirror_weights(line_weights *w) {
    reverse(w->start, w->size, 1);
    reverse(w->high, w->size, w->pairs);
    reverse(w->low, w->size, w->pairs);
    reverse(w->whole, w->size, 2 * w->pairs);
}

void free_weights(line_weights *w) {
    free(w->memory);
    w->memory = NULL;
    w->capacity = 0;
}

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
