/* Stands in for nvJPEG, on the host. A file: width, height, 1 where the engines take it, the level of its
   pixels (planes one apart), and the status that decoding it gives; the sound JPEG is none of ours. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct { uint8_t *channel[4]; size_t pitch[4]; } image;

int alive = 0, engines = 1, broken = 0, batches = 0, singles = 0, asked = 0, parsed_batched = 0, takes_sound = 1, sound_side = 128,
    no_headers = 0, room = 0;

static int is_sound(const uint8_t *file) { return file[0] == 0xff && file[1] == 0xd8; }

int nvjpegGetProperty(int kind, int *value) { *value = kind + 11; return 0; }
int nvjpegCreateEx(int backend, void *a, void *b, unsigned flags, void **handle) {
    if (a || b || flags) return 2;
    if (backend == 3 && !engines) return 7;
    alive++; *handle = malloc(1); return 0;
}
int nvjpegDestroy(void *handle) { alive--; free(handle); return 0; }
int nvjpegJpegStateCreate(void *handle, void **state) { alive++; *state = calloc(1, 8); return handle ? 0 : 2; }
int nvjpegJpegStateDestroy(void *state) { alive--; free(state); return 0; }
int nvjpegJpegStreamCreate(void *handle, void **stream) { alive++; *stream = malloc(1); return handle ? 0 : 2; }
int nvjpegJpegStreamDestroy(void *stream) { alive--; free(stream); return 0; }
int nvjpegGetImageInfo(void *handle, const uint8_t *file, size_t length, int *components, int *sampling,
                       int *widths, int *heights) {
    if (!handle || length < 5) return 3;
    *components = 3; *sampling = 0;
    widths[0] = is_sound(file) ? sound_side : file[0];
    heights[0] = is_sound(file) ? sound_side : file[1];
    return 0;
}
int nvjpegJpegStreamParseHeader(void *handle, const uint8_t *file, size_t length, void *stream) {
    if (no_headers) return no_headers;
    if (!handle || !stream || length < 5) return 3;
    asked++; parsed_batched = is_sound(file) ? takes_sound : file[2]; return 0;
}
int nvjpegDecodeBatchedSupported(void *handle, void *stream, int *no) {
    *no = !parsed_batched; return handle && stream ? 0 : 2;
}
int nvjpegDecodeBatchedPreAllocate(void *handle, void *state, int count, int width, int height, int sampling, int format) {
    if (!handle || !state || sampling || format != 3) return 2;
    room = count * width * height; return 0;
}
static int show(const uint8_t *file, image *target) {
    int sound = is_sound(file), width = sound ? 128 : file[0], height = sound ? 128 : file[1];
    if (sound && broken) return broken;
    if (!sound && file[4]) return file[4];
    for (int plane = 0; plane < 3; plane++)
        for (int y = 0; y < height; y++)
            for (int x = 0; x < width; x++)
                target->channel[plane][y * target->pitch[plane] + x] = (uint8_t)(file[3] + plane);
    return 0;
}
int nvjpegDecodeBatchedInitialize(void *handle, void *state, int count, int threads, int format) {
    *(int *)state = count; return handle && threads == 1 && format == 3 ? 0 : 2;
}
int nvjpegDecodeBatched(void *handle, void *state, const uint8_t *const *files, const size_t *lengths,
                        image *targets, void *stream) {
    batches++;
    if (!handle || stream) return 2;
    for (int i = 0; i < *(int *)state; i++) {
        if (lengths[i] < 5) return 3;
        int status = show(files[i], targets + i);
        if (status) return status;
    }
    return 0;
}
int nvjpegDecode(void *handle, void *state, const uint8_t *file, size_t length, int format, image *target,
                 void *stream) {
    singles++;
    if (!handle || !state || length < 5 || format != 3 || stream) return 2;
    return show(file, target);
}
