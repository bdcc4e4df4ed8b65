/* Weights of a line: how much each stored pixel adds to each pixel of the result.

   In: the stored line's length, the part of it that is wanted, the result's length, a filter. Out: weights
   in whole multiples of 2^-22. The arithmetic is Pillow's step by step, floats and doubles included:
   another order of operations would move a weight by one, and a pixel with it. */
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
