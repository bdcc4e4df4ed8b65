/* Writes the JPEGs that Pillow cannot: any sampling, restart intervals, scans, colour spaces, codings.

   In: RGB or grey pixels. Out: a whole file in `out`; its length, or 0 where libjpeg refuses. */
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

enum { PROGRESSIVE = 1, ARITHMETIC = 2, STORE_RGB = 4, SEPARATE_SCANS = 8, FEW_SCANS = 16 };

struct writer {
    struct jpeg_compress_struct jpeg;
    struct jpeg_error_mgr errors;
    jmp_buf failed;
};

static void stop(j_common_ptr jpeg) { longjmp(((struct writer *)jpeg)->failed, 1); }

unsigned long write_jpeg(const unsigned char *pixels, int width, int height, int bands, int quality,
                         int across, int down, int restart, int flags, unsigned char *out,
                         unsigned long capacity) {
    struct writer *w = calloc(1, sizeof *w);
    unsigned char *buffer = NULL;
    unsigned long length = 0;
    w->jpeg.err = jpeg_std_error(&w->errors);
    w->errors.error_exit = stop;
    if (setjmp(w->failed)) {
        jpeg_destroy_compress(&w->jpeg);
        free(w);
        return 0;
    }
    jpeg_create_compress(&w->jpeg);
    jpeg_mem_dest(&w->jpeg, &buffer, &length);
    w->jpeg.image_width = (JDIMENSION)width;
    w->jpeg.image_height = (JDIMENSION)height;
    w->jpeg.input_components = bands;
    w->jpeg.in_color_space = bands == 1 ? JCS_GRAYSCALE : JCS_RGB;
    jpeg_set_defaults(&w->jpeg);
    if (flags & STORE_RGB)
        jpeg_set_colorspace(&w->jpeg, JCS_RGB);
    jpeg_set_quality(&w->jpeg, quality, TRUE);
    w->jpeg.comp_info[0].h_samp_factor = across;
    w->jpeg.comp_info[0].v_samp_factor = down;
    w->jpeg.restart_interval = (unsigned)restart;
    w->jpeg.arith_code = (flags & ARITHMETIC) != 0;
    /* One scan for each component; or a progressive file that never refines what it began. */
    jpeg_scan_info separate[3] = {
        {1, {0}, 0, 63, 0, 0}, {1, {1}, 0, 63, 0, 0}, {1, {2}, 0, 63, 0, 0}};
    jpeg_scan_info few[2] = {{3, {0, 1, 2}, 0, 0, 0, 1}, {1, {0}, 1, 5, 0, 2}};
    if (flags & PROGRESSIVE)
        jpeg_simple_progression(&w->jpeg);
    if (flags & SEPARATE_SCANS) {
        w->jpeg.scan_info = separate;
        w->jpeg.num_scans = bands;
    }
    if (flags & FEW_SCANS) {
        w->jpeg.scan_info = few;
        w->jpeg.num_scans = 2;
    }
    jpeg_start_compress(&w->jpeg, TRUE);
    while (w->jpeg.next_scanline < w->jpeg.image_height) {
        JSAMPROW row = (JSAMPROW)(pixels + (size_t)w->jpeg.next_scanline * width * bands);
        jpeg_write_scanlines(&w->jpeg, &row, 1);
    }
    jpeg_finish_compress(&w->jpeg);
    jpeg_destroy_compress(&w->jpeg);
    if (length <= capacity)
        memcpy(out, buffer, length);
    free(buffer);
    free(w);
    return length <= capacity ? length : 0;
}
