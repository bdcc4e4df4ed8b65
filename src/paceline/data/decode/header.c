/* The header of a JPEG, read strictly: is it a file that the region decoder takes?

   Only files beyond doubt are taken, so that this decoder and Pillow never differ: one frame of 8-bit grey or
   YCbCr/RGB, Huffman coded, upright, with well-formed segments. Pillow reads Exif, XMP, Photoshop blocks,
   colour profiles and more when it opens a file; a file in which any of these is odd is left to Pillow. */
#include <string.h>

#include "region.h"

typedef struct {
    const uint8_t *data;
    size_t length;
} segment;

/* What the segments of a file said so far. */
typedef struct {
    int exifs, exif_says_upright, xmp_may_turn;
} metadata;

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

static int application_is_harmless(int kind, segment s, metadata *found) {
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
static int is_upright(const metadata *found) { return found->exif_says_upright || !found->xmp_may_turn; }

enum { SOF0 = 0xC0, SOF2 = 0xC2, DHT = 0xC4, RST0 = 0xD0, RST7 = 0xD7, EOI = 0xD9, SOS = 0xDA };
enum { DQT = 0xDB, DRI = 0xDD, APP0 = 0xE0, APP15 = 0xEF, COM = 0xFE };

static unsigned two_bytes(const uint8_t *p) { return (unsigned)p[0] << 8 | p[1]; }

static int frame_is_ours(int marker, segment s, jpeg_header *header) {
    if (header->components || s.length < 6 || s.data[0] != 8)
        return 0;
    header->height = (int)two_bytes(s.data + 1);
    header->width = (int)two_bytes(s.data + 3);
    header->components = s.data[5];
    header->progressive = marker == SOF2;
    if (header->components != 1 && header->components != 3)
        return 0;
    if (s.length != 6 + 3 * (size_t)header->components || !header->width || !header->height)
        return 0;
    if ((int64_t)header->width * header->height > REGION_MAX_PIXELS)
        return 0;
    /* Chroma of other shares than a whole one of luma's was not compared. */
    return header->components == 1 || (s.data[10] == 0x11 && s.data[13] == 0x11);
}

/* Damage after the rows that are decoded would pass unseen; a cut file must not. */
int ends_in_eoi(const jpeg_header *header, const uint8_t *data, size_t length) {
    const uint8_t *at = data + header->scan, *end = data + length;
    while ((at = memchr(at, 0xFF, (size_t)(end - at))) && end - at >= 2) {
        if (at[1] == EOI)
            return 1;
        if (at[1] != 0 && (at[1] < RST0 || at[1] > RST7))
            return 0;
        at += 2;
    }
    return 0;
}

int read_jpeg_header(const uint8_t *data, size_t length, jpeg_header *header) {
    memset(header, 0, sizeof *header);
    if (length < 4 || memcmp(data, "\xFF\xD8", 2) != 0)
        return REGION_NOT_OURS;
    metadata found = {0, 0, 0};
    for (size_t at = 2; length - at >= 4;) {
        int marker = data[at + 1];
        segment s = {data + at + 4, two_bytes(data + at + 2)};
        if (data[at] != 0xFF || s.length < 2 || s.length > length - at - 2)
            return REGION_NOT_OURS;
        at += 2 + s.length;
        s.length -= 2;
        int ours = marker == DHT || marker == DQT || marker == DRI || marker == COM;
        if (marker >= APP0 && marker <= APP15)
            ours = application_is_harmless(marker - APP0, s, &found);
        else if (marker >= SOF0 && marker <= SOF2)
            ours = frame_is_ours(marker, s, header);
        else if (marker == SOS) {
            ours = header->components && s.length >= 1 && is_upright(&found);
            if (ours && !header->progressive) /* all components in one scan */
                ours = s.data[0] == header->components;
            header->scan = at;
            return ours ? REGION_DONE : REGION_NOT_OURS;
        }
        if (!ours)
            return REGION_NOT_OURS;
    }
    return REGION_NOT_OURS;
}
