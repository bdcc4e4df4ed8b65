/* Application segments of a JPEG: would any make Pillow turn the image, take another one, or fail?

   In: a segment. Out: whether it is harmless beyond doubt. Pillow reads Exif, XMP, Photoshop's blocks, colour
   profiles and more while it opens a file; one that is odd is Pillow's. */
#include <string.h>

#include "region.h"

enum { ORIENTATION = 0x0112, X_RESOLUTION = 0x011A, RESOLUTION_UNIT = 0x0128 };
enum { SHORT = 3, RATIONAL = 5, TYPES = 14 };
enum { RESOLUTION_INFO = 0x03ED, RESOLUTION_INFO_BYTES = 14 };

static int begins(segment s, const char *text, size_t length) {
    return s.length >= length && memcmp(s.data, text, length) == 0;
}

/* In the order of TIFF's own mark. */
static uint32_t number(const uint8_t *p, int bytes, int little) {
    uint32_t value = 0;
    for (int i = 0; i < bytes; i++)
        value = value << 8 | p[little ? bytes - 1 - i : i];
    return value;
}

/* Its value lies within the `length` bytes, and it says nothing that Pillow would act upon. */
static int entry_is_harmless(const uint8_t *entry, size_t length, int little, metadata *found) {
    static const uint8_t BYTES[TYPES] = {0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4};
    uint32_t tag = number(entry, 2, little), type = number(entry + 2, 2, little);
    uint32_t count = number(entry + 4, 4, little);
    if (type < 1 || type >= TYPES)
        return 0;
    uint64_t bytes = (uint64_t)count * BYTES[type];
    if (bytes > 4 && (bytes > length || number(entry + 8, 4, little) > length - bytes))
        return 0;
    if (tag == ORIENTATION) {
        found->exif_says_upright = 1;
        return type == SHORT && count == 1 && number(entry + 8, 2, little) == 1;
    }
    if (tag == X_RESOLUTION)
        return type == RATIONAL && count == 1;
    if (tag == RESOLUTION_UNIT)
        return type == SHORT && count == 1;
    return 1;
}

/* The first directory is whole, with the offset of the next one behind it. Of one that is not, Pillow
   reads a part. */
static int exif_is_harmless(segment s, metadata *found) {
    const uint8_t *tiff = s.data + 6;
    size_t length = s.length - 6;
    if (length < 8)
        return 0;
    int little = memcmp(tiff, "II*\0", 4) == 0;
    if (!little && memcmp(tiff, "MM\0*", 4) != 0)
        return 0;
    size_t at = number(tiff + 4, 4, little);
    if (at > length - 2)
        return 0;
    size_t entries = number(tiff + at, 2, little);
    if (entries * 12 + 4 > length - at - 2)
        return 0;
    for (const uint8_t *entry = tiff + at + 2; entries > 0; entries--, entry += 12)
        if (!entry_is_harmless(entry, length, little, found))
            return 0;
    return 1;
}

/* Every block is whole: signature, code, name with its length in front, data with theirs; both padded. */
static int photoshop_is_harmless(segment s) {
    size_t at = 14;
    while (at < s.length && s.length - at >= 4 && memcmp(s.data + at, "8BIM", 4) == 0) {
        if (s.length - at < 7)
            return 0;
        uint32_t code = number(s.data + at + 4, 2, 0);
        at += 7 + (size_t)s.data[at + 6];
        at += at & 1;
        if (at > s.length || s.length - at < 4)
            return 0;
        size_t size = number(s.data + at, 4, 0);
        at += 4;
        if (size > s.length - at || (code == RESOLUTION_INFO && size < RESOLUTION_INFO_BYTES))
            return 0;
        at += size;
        at += at & 1;
    }
    return 1;
}

static int mentions(segment s, const char *word) {
    size_t length = strlen(word);
    for (size_t i = 0; i + length <= s.length; i++)
        if (memcmp(s.data + i, word, length) == 0)
            return 1;
    return 0;
}

int application_is_harmless(int kind, segment s, metadata *found) {
    if (kind == 0 && begins(s, "JFIF", 4))
        return s.length >= 14;
    if (kind == 1 && begins(s, "Exif\0", 6)) /* Pillow joins several */
        return ++found->exifs == 1 && exif_is_harmless(s, found);
    if (kind == 1)
        found->xmp_may_turn |= mentions(s, "Orientation");
    if (kind == 2 && begins(s, "ICC_PROFILE", 12))
        return s.length > 14;
    if (kind == 2)
        return !begins(s, "MPF", 4);
    if (kind == 13 && begins(s, "Photoshop 3.0", 14))
        return photoshop_is_harmless(s);
    if (kind == 14 && begins(s, "Adobe", 5))
        return s.length >= 12;
    return 1;
}

/* XMP counts where Exif is silent. */
int is_upright(const metadata *found) { return found->exif_says_upright || !found->xmp_may_turn; }
