/* Many pieces of files, read by one call: Python would give its lock away, and fight for it, at each. */
#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include "region.h"

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
