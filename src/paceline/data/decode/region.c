/* A box of a JPEG as a square of pixels: only the rows and columns that the box needs are decoded.

   The result is size x size x channels bytes, equal to what Pillow gives for decoding the whole image, converting,
   resizing with the box, and flipping. No global state: a `region` belongs to one thread at a time. Nothing is
   printed, and damaged files do not end the process. The functions for many files exist because Python would
   release and reacquire its interpreter lock for each. */
#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "region.h"

/* Before, skipping and cropping went wrong for some files; other libjpegs have neither. */
#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2000006
#error "the region decoder needs libjpeg-turbo 2.0.6 or later"
#endif

enum { MARGIN = 8 };          /* upsampling of chroma looks one sample further: two pixels at most */

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

/* The one that is loaded may be another: none tells its version. */
const char *region_version(void) {
    return "built against libjpeg-turbo " TEXT(LIBJPEG_TURBO_VERSION);
}

static void stop(j_common_ptr jpeg) { longjmp(((region *)jpeg)->complain, 1); }

/* A warning is damage too: Pillow shall judge it. */
static void stop_at_warning(j_common_ptr jpeg, int level) {
    if (level < 0)
        stop(jpeg);
}

static void say_nothing(j_common_ptr jpeg) { (void)jpeg; }

/* Fails where the libjpeg that was loaded is another one than was compiled for. */
static int create_works(region *self) {
    if (setjmp(self->complain))
        return 0;
    jpeg_create_decompress(&self->jpeg);
    jpeg_destroy_decompress(&self->jpeg);
    return 1;
}

region *region_open(void) {
    region *self = calloc(1, sizeof *self);
    if (!self)
        return NULL;
    self->jpeg.err = jpeg_std_error(&self->errors);
    self->errors.error_exit = stop;
    self->errors.emit_message = stop_at_warning;
    self->errors.output_message = say_nothing;
    if (create_works(self))
        return self;
    free(self);
    return NULL;
}

void region_close(region *self) {
    if (!self)
        return;
    free_weights(&self->across);
    free_weights(&self->down);
    release(&self->decoded);
    release(&self->between);
    release(&self->lines);
    free(self);
}

int region_size(const uint8_t *data, size_t length, int32_t *width, int32_t *height) {
    jpeg_header header;
    int outcome = read_jpeg_header(data, length, &header);
    *width = header.width;
    *height = header.height;
    return outcome;
}

/* Smoothing of coefficients that no scan brought differs between versions of libjpeg. */
static int lacks_coefficients(j_decompress_ptr jpeg) {
    for (int c = 0; jpeg->progressive_mode && c < jpeg->num_components; c++)
        for (int i = 0; i < DCTSIZE2; i++)
            if (jpeg->coef_bits[c][i] != 0)
                return 1;
    return 0;
}

/* From here on libjpeg may jump. */
static int start(region *self, const jpeg_header *header, const uint8_t *data, size_t length,
                 work *w) {
    j_decompress_ptr jpeg = &self->jpeg;
    jpeg_mem_src(jpeg, data, (unsigned long)length);
    jpeg_read_header(jpeg, TRUE);
    J_COLOR_SPACE space = jpeg->jpeg_color_space;
    if (space != JCS_GRAYSCALE && space != JCS_YCbCr && space != JCS_RGB)
        return REGION_NOT_OURS;
    if ((int)jpeg->image_width != header->width || (int)jpeg->image_height != header->height)
        return REGION_NOT_OURS;
    jpeg->out_color_space = w->decoded_bands == 1 ? JCS_GRAYSCALE : JCS_EXT_RGBX;
    jpeg_start_decompress(jpeg);
    if (lacks_coefficients(jpeg) || jpeg->output_components != w->decoded_bands)
        return REGION_NOT_OURS;
    int left = self->across.first - MARGIN, right = self->across.end + MARGIN;
    left = left < 0 ? 0 : left;
    right = right > header->width ? header->width : right;
    JDIMENSION offset = (JDIMENSION)left, width = (JDIMENSION)(right - left);
    if (width < jpeg->output_width)
        jpeg_crop_scanline(jpeg, &offset, &width);
    w->first_column = (int)offset;
    w->columns = (int)width;
    JDIMENSION above = (JDIMENSION)self->down.first;
    if (above && jpeg_skip_scanlines(jpeg, above) != above)
        return REGION_DAMAGED;
    return REGION_DONE;
}

static void decode_rows(region *self, const work *w, int first, int count, uint8_t **rows) {
    (void)w, (void)first; /* libjpeg knows where it is */
    for (int got = 0; got < count;)
        got += (int)jpeg_read_scanlines(&self->jpeg, rows + got, (JDIMENSION)(count - got));
}

static int decode(region *self, const jpeg_header *header, const uint8_t *data, size_t length,
                  work *w, uint8_t *out) {
    if (setjmp(self->complain))
        return REGION_DAMAGED;
    /* A new one for each file: tables of one file would serve for those that the next one lacks. */
    jpeg_create_decompress(&self->jpeg);
    int outcome = start(self, header, data, length, w);
    return outcome == REGION_DONE ? fill_square(self, w, out) : outcome;
}

int region_prepare(region *self, const uint8_t *data, size_t length, float left, float top,
                   float right, float bottom, int flip, int size, int filter,
                   int down_first, int channels, uint8_t *out) {
    jpeg_header header;
    if (!self || (channels != 1 && channels != 3) || size < 1 || size > JPEG_MAX_DIMENSION)
        return REGION_BAD_ARGUMENT;
    if (length > ULONG_MAX || read_jpeg_header(data, length, &header) != REGION_DONE)
        return REGION_NOT_OURS;
    /* libjpeg itself reads progressive files to their end. */
    if (!header.progressive && !ends_in_eoi(&header, data, length))
        return REGION_DAMAGED;
    const float box[] = {left, top, right, bottom};
    int outcome = weigh_box(self, header.width, header.height, box, flip, size, filter);
    if (outcome == REGION_DONE) {
        work w = {.size = size, .channels = channels, .down_first = down_first};
        w.decode_rows = decode_rows;
        w.decoded_bands = header.components == 1 ? 1 : 4;
        outcome = decode(self, &header, data, length, &w, out);
        jpeg_destroy_decompress(&self->jpeg);
    }
    release_what_is_large(self);
    return outcome;
}

/* Width and height of each, 0 and 0 where it is not ours. */
void region_sizes(int count, const uint8_t *const *files, const int64_t *lengths, int32_t *sizes) {
    for (int i = 0; i < count; i++) {
        int32_t *here = sizes + 2 * i;
        if (region_size(files[i], (size_t)lengths[i], here, here + 1) != REGION_DONE)
            here[0] = here[1] = 0;
    }
}

/* `boxes`: left, top, right, bottom of each. `turns`: for each whether to flip, and whether rows go first. */
void region_prepare_many(region *self, int count, const uint8_t *const *files, const int64_t *lengths,
                         const float *boxes, const int32_t *turns, int size, int filter, int channels,
                         uint8_t *const *targets, int32_t *outcomes) {
    for (int i = 0; i < count; i++) {
        const float *box = boxes + 4 * i;
        outcomes[i] = region_prepare(self, files[i], (size_t)lengths[i], box[0], box[1], box[2], box[3],
                                     turns[2 * i], size, filter, turns[2 * i + 1], channels, targets[i]);
    }
}

static int64_t read_piece(int descriptor, uint8_t *target, int64_t offset, int64_t size) {
    int64_t done = 0;
    while (done < size) {
        ssize_t more = pread(descriptor, target + done, (size_t)(size - done), offset + done);
        if (more < 0 && errno == EINTR)
            continue;
        if (more < 0)
            return -1;
        if (more == 0)
            break;
        done += more;
    }
    return done;
}

/* For each piece three numbers into `found`: the bytes read, or -1, then the size and the time of change,
   in nanoseconds, of its file after the read. */
void region_read_many(int count, const int *descriptors, const int64_t *offsets, const int64_t *sizes,
                      uint8_t *const *targets, int64_t *found) {
    for (int i = 0; i < count; i++) {
        struct stat now;
        int64_t *here = found + 3 * i;
        here[0] = read_piece(descriptors[i], targets[i], offsets[i], sizes[i]);
        if (here[0] < 0 || fstat(descriptors[i], &now) != 0) {
            here[0] = -1;
            continue;
        }
        here[1] = (int64_t)now.st_size;
        here[2] = (int64_t)now.st_mtim.tv_sec * 1000000000 + now.st_mtim.tv_nsec;
    }
}
