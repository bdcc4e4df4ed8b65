/* Damaged JPEGs, and pixels, through the region decoder, under AddressSanitizer and UBSan.

   In: how many, a number to begin with, and good files. Out: how many were done and refused; a finding ends
   the process. Files, pixels and results lie in memory of their exact size, so that a byte too far is found; and so
   does what the decoder holds, because a new one comes for every few files. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "region.h"

static uint64_t state;

static uint32_t draw(uint32_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 33) % (below ? below : 1);
}

typedef struct {
    uint8_t *bytes;
    size_t length;
} file;

static file read_file(const char *path) {
    file f = {malloc(1 << 20), 0};
    FILE *stream = fopen(path, "rb");
    if (!stream || !f.bytes)
        exit(2);
    f.length = fread(f.bytes, 1, 1 << 20, stream);
    fclose(stream);
    return f;
}

static size_t find_marker(const file *f, int marker) {
    for (size_t i = 0; i + 9 < f->length; i++)
        if (f->bytes[i] == 0xFF && f->bytes[i + 1] == marker)
            return i;
    return 0;
}

/* `f` has room for as much again. */
static void mutate(file *f, const file *other) {
    size_t at = draw((uint32_t)f->length), span = 1 + draw(60), frame, scan;
    if (draw(2))
        at %= 700 < f->length ? 700 : f->length;
    if (span > f->length - at)
        span = f->length - at;
    switch (draw(11)) {
    case 0: f->bytes[at] ^= (uint8_t)(1 << draw(8)); break;
    case 1: f->bytes[at] = (uint8_t)draw(256); break;
    case 2: f->bytes[at] = 0xFF; break;
    case 3: f->length = at; break;
    case 4: memset(f->bytes + at, 0, span); break;
    case 5: /* cut out */
        memmove(f->bytes + at, f->bytes + at + span, f->length - at - span);
        f->length -= span;
        break;
    case 6: /* double */
        memmove(f->bytes + at + span, f->bytes + at, f->length - at);
        f->length += span;
        break;
    case 7: /* splice */
        if (span <= other->length)
            memcpy(f->bytes + at, other->bytes + draw((uint32_t)(other->length - span + 1)), span);
        break;
    case 8: /* other dimensions, sampling factors or tables */
        frame = find_marker(f, 0xC0 + (int)draw(3));
        f->bytes[frame + 5 + draw(4)] = (uint8_t)draw(256);
        break;
    case 9: /* another kind of file */
        frame = find_marker(f, 0xC0 + (int)draw(3));
        f->bytes[frame + 1] = (uint8_t)(0xC0 + draw(16));
        break;
    default: /* the scan's own settings */
        scan = find_marker(f, 0xDA);
        f->bytes[scan + 2 + draw(8)] = (uint8_t)draw(256);
    }
}

/* A byte too far is found only in memory of the exact size. */
static int try_one(region *decoder, const file *f) {
    static const int SIZES[] = {1, 7, 32, 33, 224};
    uint8_t *exact = malloc(f->length ? f->length : 1);
    memcpy(exact, f->bytes, f->length);
    int32_t width = 0, height = 0;
    int outcome = region_size(exact, f->length, &width, &height);
    if (outcome == REGION_DONE) {
        float left = (float)draw((uint32_t)width), top = (float)draw((uint32_t)height);
        float right = left + 1 + (float)draw((uint32_t)width - (uint32_t)left);
        float bottom = top + 0.5f + (float)draw((uint32_t)height - (uint32_t)top);
        int size = SIZES[draw(5)], channels = draw(2) ? 3 : 1;
        uint8_t *out = malloc((size_t)(size * size * channels));
        outcome = region_prepare(decoder, exact, f->length, left, top, right, bottom, (int)draw(2),
                                 size, (int)draw(4), (int)draw(2), channels, out);
        free(out);
    }
    free(exact);
    return outcome;
}

/* Pixels of any size and box, some of them wrong. */
static int try_pixels(region *decoder) {
    static const int SIZES[] = {1, 7, 32, 33, 64}, BANDS[] = {1, 3, 3, 1, 3, 2};
    int width = 1 + (int)draw(40), height = 1 + (int)draw(draw(4) ? 40 : 300), bands = BANDS[draw(6)];
    int size = SIZES[draw(5)], channels = draw(2) ? 3 : 1;
    size_t length = (size_t)(width * height * bands);
    uint8_t *exact = malloc(length), *out = malloc((size_t)(size * size * channels));
    for (size_t i = 0; i < length; i++)
        exact[i] = (uint8_t)draw(256);
    float left = (float)draw((uint32_t)(8 * width)) / 8, top = (float)draw((uint32_t)(8 * height)) / 8;
    float right = (float)width, bottom = (float)height;
    if (draw(3)) /* now and then beyond the edge */
        right = left + (float)(1 + draw((uint32_t)(8 * width))) / 8;
    if (draw(3))
        bottom = top + (float)(1 + draw((uint32_t)(8 * height))) / 8;
    int outcome =
        region_square_of_pixels(decoder, exact, width, height, bands, left, top, right, bottom,
                                (int)draw(2), size, (int)draw(4), (int)draw(2), channels, out);
    free(out);
    free(exact);
    return outcome;
}

int main(int count, char **arguments) {
    if (count < 4)
        return 2;
    int files = count - 3;
    long wanted = atol(arguments[1]), outcomes[5] = {0}, of_pixels[5] = {0};
    state = (uint64_t)atoll(arguments[2]) * 2654435761u + 88172645463325252u;
    file *seeds = calloc((size_t)files, sizeof *seeds);
    for (int i = 0; i < files; i++)
        seeds[i] = read_file(arguments[3 + i]);
    region *decoder = NULL;
    file f = {malloc(1 << 21), 0};
    for (long i = 0; i < wanted; i++) {
        const file *seed = &seeds[i % files], *other = &seeds[draw((uint32_t)files)];
        memcpy(f.bytes, seed->bytes, f.length = seed->length);
        for (uint32_t changes = draw(4); changes > 0 && f.length > 10; changes--)
            mutate(&f, other);
        /* Mostly new: memory that has grown for one file hides an overrun of the next. */
        if (!decoder || draw(4)) {
            region_close(decoder);
            decoder = region_open();
        }
        outcomes[try_one(decoder, &f)]++;
        of_pixels[try_pixels(decoder)]++;
    }
    region_close(decoder);
    for (int i = 0; i < files; i++)
        free(seeds[i].bytes);
    free(seeds);
    free(f.bytes);
    printf("%ld files: %ld done, %ld not ours, %ld damaged, %ld no memory, %ld bad argument\n", wanted,
           outcomes[0], outcomes[1], outcomes[2], outcomes[3], outcomes[4]);
    printf("%ld arrays: %ld done, %ld bad argument\n", wanted, of_pixels[REGION_DONE],
           of_pixels[REGION_BAD_ARGUMENT]);
    return 0;
}
