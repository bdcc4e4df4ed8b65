/* What a decoder holds between its files, and what a call to it wants. */
#ifndef PACELINE_REGION_STATE_H
#define PACELINE_REGION_STATE_H

#include <setjmp.h>
#include <stdio.h>

#include <jpeglib.h>

#include "region.h"

typedef struct {
    uint8_t *bytes;
    size_t capacity;
} buffer;

struct region {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors;
    jmp_buf complain;
    line_weights across, down;
    buffer decoded, between, lines;
};

/* What a call wants, where its rows come from, and what lies in them once they are decoded. */
typedef struct work work;
struct work {
    int size, channels, down_first;
    /* Rows of the box from its `first` on, from `first_column` on. May jump to `complain`. */
    void (*decode_rows)(region *self, const work *w, int first, int count, uint8_t **rows);
    const uint8_t *pixels;   /* those rows, `stride` bytes apart, where they lie in memory */
    size_t stride;
    int decoded_bands;       /* 1 grey, 4 RGB and a byte of nothing */
    int bands;               /* the same once colour is made grey where grey is wanted */
    int first_column, columns, rows;
    size_t row_bytes;        /* of a decoded row, with what may be read beyond it */
};

/* memory.c */
int hold(buffer *b, size_t bytes);
void release(buffer *b);
void release_what_is_large(region *self);

/* square.c */
/* The weights of both passes. `box`: left, top, right, bottom in an image of this size. */
int weigh_box(region *self, int width, int height, const float box[4], int flip, int size, int filter);
/* With these weights; of `w` all is set but `bands`, `rows` and `row_bytes`. */
int fill_square(region *self, work *w, uint8_t *out);

#endif
