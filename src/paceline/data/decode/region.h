/* What the files of the region decoder share. Callers load the functions region_* by name. */
#ifndef PACELINE_REGION_H
#define PACELINE_REGION_H

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

/* Anything but REGION_DONE: the caller falls back to Pillow, which also reports what is wrong with the file. */
enum { REGION_DONE, REGION_NOT_OURS, REGION_DAMAGED, REGION_NO_MEMORY, REGION_BAD_ARGUMENT };
enum { FILTER_NEAREST, FILTER_BILINEAR, FILTER_BICUBIC, FILTER_LANCZOS };

/* Pillow warns above this, and refuses twice as many. */
#ifndef REGION_MAX_PIXELS
#define REGION_MAX_PIXELS 89478485
#endif

/* header.c */
typedef struct {
    int width, height, components, progressive;
    size_t scan; /* where the first scan's data begins */
} jpeg_header;

int read_jpeg_header(const uint8_t *data, size_t length, jpeg_header *header);
int ends_in_eoi(const jpeg_header *header, const uint8_t *data, size_t length);

/* resample.c: what each of `size` pixels takes from a line of `stored` ones, as whole multiples of 2^-22.
   A weight is high * 2^11 + low; a pair of taps lies in one 32-bit word, as pmaddwd wants it. */
enum { WEIGHT_BITS = 22, LOW_BITS = 11 };

typedef struct {
    int size, pairs;
    int first, end;          /* the part of the line that is used */
    int copies;              /* each pixel is a copy of the stored one at its start */
    int32_t *start;          /* [size] */
    int32_t *high, *low;     /* [size * pairs] */
    int32_t *whole;          /* [size * pairs * 2] */
    void *memory;
    size_t capacity;
} line_weights;

int make_weights(line_weights *weights, int stored, float begin, float end, int size, int filter);
void mirror_weights(line_weights *weights);
void free_weights(line_weights *weights);
/* Columns: rows of `bands` bytes a pixel (4: the last is dropped) become rows of `size` pixels.
   A source row is readable to start + 2 * pairs pixels, a target row writable for one byte more. */
void resample_across(const uint8_t *const *rows, int count, int bands, const line_weights *weights,
                     uint8_t *const *targets);
/* Rows: `bytes` columns of the rows from weights->first on, `stride` apart, into `size` rows.
   A source row is readable to the next multiple of 32 bytes. */
void resample_down(const uint8_t *source, size_t stride, int bytes, const line_weights *weights,
                   uint8_t *target);

/* Memory that is reused from file to file. */
typedef struct {
    uint8_t *bytes;
    size_t capacity;
} buffer;

/* What a decoder holds between files. */
typedef struct region {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    jmp_buf complain;
    line_weights across, down;
    buffer decoded, between, lines;
} region;

/* What a call wants, where its rows come from, and what lies in them once they are decoded. */
typedef struct work work;
struct work {
    int size, channels, down_first;
    /* Rows of the box from its `first` on, from `first_column` on. May jump to `complain`. */
    void (*decode_rows)(region *self, const work *w, int first, int count, uint8_t **rows);
    const uint8_t *pixels;   /* those rows, `stride` bytes apart, where they lie in memory */
    size_t stride;
    int decoded_bands;       /* 1 grey, 4 RGB and an unused byte */
    int bands;               /* the same after conversion of colour to grey where grey is wanted */
    int first_column, columns, rows;
    size_t row_bytes;        /* of a decoded row, with what may be read beyond it */
};

/* square.c */
void release(buffer *b);
void release_what_is_large(region *self);
/* The weights of both passes. `box`: left, top, right, bottom in an image of this size. */
int weigh_box(region *self, int width, int height, const float box[4], int flip, int size, int filter);
/* With these weights; of `w` all is set but `bands`, `rows` and `row_bytes`. */
int fill_square(region *self, work *w, uint8_t *out);

/* The functions that callers load, and the only symbols that the library exports. */
#define SHOWN __attribute__((visibility("default")))

SHOWN const char *region_version(void);
SHOWN region *region_open(void); /* NULL: no memory, or a libjpeg of another ABI. One a thread. */
SHOWN void region_close(region *self);
SHOWN int region_size(const uint8_t *data, size_t length, int32_t *width, int32_t *height);
SHOWN int region_prepare(region *self, const uint8_t *data, size_t length, float left, float top,
                         float right, float bottom, int flip, int size, int filter, int down_first,
                         int channels, uint8_t *out);
/* The same for an image that lies decoded in memory, row after row. */
SHOWN int region_square_of_pixels(region *self, const uint8_t *pixels, int width, int height, int bands,
                                  float left, float top, float right, float bottom, int flip, int size,
                                  int filter, int down_first, int channels, uint8_t *out);
SHOWN void region_sizes(int count, const uint8_t *const *files, const int64_t *lengths, int32_t *sizes);
SHOWN void region_prepare_many(region *self, int count, const uint8_t *const *files,
                               const int64_t *lengths, const float *boxes, const int32_t *turns,
                               int size, int filter, int channels, uint8_t *const *targets,
                               int32_t *outcomes);
SHOWN void region_read_many(int count, const int *descriptors, const int64_t *offsets,
                            const int64_t *sizes, uint8_t *const *targets, int64_t *found);

#endif
