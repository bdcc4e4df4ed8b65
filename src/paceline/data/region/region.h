/* What the files of the region decoder know of one another. Its callers load region_* by name. */
#ifndef PACELINE_REGION_H
#define PACELINE_REGION_H

#include <stddef.h>
#include <stdint.h>

/* Anything but REGION_DONE: the caller takes its other decoder, which also finds the words for damage. */
enum { REGION_DONE, REGION_NOT_OURS, REGION_DAMAGED, REGION_NO_MEMORY, REGION_BAD_ARGUMENT };
enum { FILTER_NEAREST, FILTER_BILINEAR, FILTER_BICUBIC, FILTER_LANCZOS };

/* Pillow warns above this, and refuses twice as many. */
#ifndef REGION_MAX_PIXELS
#define REGION_MAX_PIXELS 89478485
#endif

/* metadata.c */
typedef struct {
    const uint8_t *data;
    size_t length;
} segment;

/* What a file's segments said so far. */
typedef struct {
    int exifs, exif_says_upright, xmp_may_turn;
} metadata;

/* Of APPn, n being `kind`. */
int application_is_harmless(int kind, segment s, metadata *found);
int is_upright(const metadata *found);

/* jpeg_header.c */
typedef struct {
    int width, height, components, progressive;
    size_t scan; /* where the first scan's data begins */
} jpeg_header;

int read_jpeg_header(const uint8_t *data, size_t length, jpeg_header *header);
int ends_in_eoi(const jpeg_header *header, const uint8_t *data, size_t length);

/* weights.c: what each of `size` pixels takes from a line of `stored` ones, as whole multiples of 2^-22.
   A weight is high * 2^11 + low; a pair of taps lies in one 32-bit word, as pmaddwd wants it. */
enum { WEIGHT_BITS = 22, LOW_BITS = 11 };

typedef struct {
    int size, pairs;
    int first, end;          /* of the line, what is used */
    int copies;              /* each pixel is the stored one at its start, as it is */
    int32_t *start;          /* [size] */
    int32_t *high, *low;     /* [size * pairs] */
    int32_t *whole;          /* [size * pairs * 2] */
    void *memory;
    size_t capacity;
} line_weights;

int make_weights(line_weights *weights, int stored, float begin, float end, int size, int filter);
void mirror_weights(line_weights *weights);
void free_weights(line_weights *weights);

/* resample.c */
/* Columns: rows of `bands` bytes a pixel (4: the last is dropped) become rows of `size` pixels.
   A source row is readable to start + 2 * pairs pixels, a target row writable for one byte more. */
void resample_across(const uint8_t *const *rows, int count, int bands, const line_weights *weights,
                     uint8_t *const *targets);
/* Rows: `bytes` columns of the rows from weights->first on, `stride` apart, into `size` rows.
   A source row is readable to the next multiple of 32 bytes. */
void resample_down(const uint8_t *source, size_t stride, int bytes, const line_weights *weights,
                   uint8_t *target);

/* jpeg_region.c: the functions that callers load, and the only names that the library shows. */
#define SHOWN __attribute__((visibility("default")))
typedef struct region region;

SHOWN const char *region_version(void);
SHOWN region *region_open(void); /* NULL: no memory, or a libjpeg of another ABI. One a thread. */
SHOWN void region_close(region *self);
SHOWN int region_size(const uint8_t *data, size_t length, int32_t *width, int32_t *height);
SHOWN int region_prepare(region *self, const uint8_t *data, size_t length, float left, float top,
                         float right, float bottom, int flip, int size, int filter, int down_first,
                         int channels, uint8_t *out);

/* pixels.c: the same of an image that lies decoded in memory, its rows one behind the other. */
SHOWN int region_square_of_pixels(region *self, const uint8_t *pixels, int width, int height, int bands,
                                  float left, float top, float right, float bottom, int flip, int size,
                                  int filter, int down_first, int channels, uint8_t *out);

/* many.c */
SHOWN void region_sizes(int count, const uint8_t *const *files, const int64_t *lengths, int32_t *sizes);
SHOWN void region_prepare_many(region *self, int count, const uint8_t *const *files,
                               const int64_t *lengths, const float *boxes, const int32_t *turns,
                               int size, int filter, int channels, uint8_t *const *targets,
                               int32_t *outcomes);

/* read_many.c */
SHOWN void region_read_many(int count, const int *descriptors, const int64_t *offsets,
                            const int64_t *sizes, uint8_t *const *targets, int64_t *found);

#endif
