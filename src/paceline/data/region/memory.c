/* Memory that serves file after file. */
#include <stdlib.h>

#include "state.h"

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
