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

/* What a call wants, and what lies in the decoded rows. */
typedef struct {
    int size, channels, down_first;
    int decoded_bands;       /* 1 grey, 4 RGB and a byte of nothing */
    int bands;               /* the same once colour is made grey where grey is wanted */
    int first_column, columns, rows;
    size_t row_bytes;        /* of a decoded row, with what may be read beyond it */
} work;

/* memory.c */
int hold(buffer *b, size_t bytes);
void release(buffer *b);

/* square.c: both read the rows that are due, and may jump to `complain` while they do. */
int across_then_down(region *self, const work *w, uint8_t *out);
int down_then_across(region *self, const work *w, uint8_t *out);

#endif
