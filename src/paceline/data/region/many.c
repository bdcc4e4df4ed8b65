/* Many files by one call, for the same reason as in read_many.c. */
#include "region.h"

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
