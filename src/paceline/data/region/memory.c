/* Memory that serves file after file. */
#include <stdlib.h>

#include "state.h"

enum { KEPT_BYTES = 1 << 24 }; /* more than this is not kept for the next image */

void release(buffer *b) {
    free(b->bytes);
    b->bytes = NULL;
    b->capacity = 0;
}

/* New memory is zero: what lies beyond a row is read, though with no weight. */
int hold(buffer *b, size_t bytes) {
    if (bytes <= b->capacity)
        return 1;
    release(b);
    b->bytes = calloc(bytes, 1);
    b->capacity = b->bytes ? bytes : 0;
    return b->bytes != NULL;
}

void release_what_is_large(region *self) {
    buffer *buffers[] = {&self->decoded, &self->between, &self->lines};
    for (int i = 0; i < 3; i++)
        if (buffers[i]->capacity > KEPT_BYTES)
            release(buffers[i]);
    if (self->across.capacity > KEPT_BYTES)
        free_weights(&self->across);
    if (self->down.capacity > KEPT_BYTES)
        free_weights(&self->down);
}
