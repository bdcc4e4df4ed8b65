/* The header of a JPEG, read strictly: is it a file that the region decoder takes?

   In: a whole file. Out: its size and kind, or REGION_NOT_OURS. Taken is only what is beyond doubt, so that
   this decoder and Pillow never differ: one frame of 8-bit grey or YCbCr/RGB, Huffman coded, upright,
   whose every segment is well formed. */
#include <string.h>

#include "region.h"

enum { SOF0 = 0xC0, SOF2 = 0xC2, DHT = 0xC4, RST0 = 0xD0, RST7 = 0xD7, EOI = 0xD9, SOS = 0xDA };
enum { DQT = 0xDB, DRI = 0xDD, APP0 = 0xE0, APP1 = 0xE1, APP2 = 0xE2, APP14 = 0xEE, APP15 = 0xEF };
enum { COM = 0xFE };

typedef struct {
    const uint8_t *data;
    size_t length;
} segment;

static unsigned two_bytes(const uint8_t *p) { return (unsigned)p[0] << 8 | p[1]; }

static int begins(segment s, const char *text, size_t length) {
    return s.length >= length && memcmp(s.data, text, length) == 0;
}

/* In the order of TIFF's own mark. */
static unsigned tiff_number(const uint8_t *p, int bytes, int little) {
    unsigned value = 0;
    for (int i = 0; i < bytes; i++)
        value = value << 8 | p[little ? bytes - 1 - i : i];
    return value;
}

/* What the segments before the frame say of the image's turning. */
typedef struct {
    int exifs, says_upright, may_say_otherwise;
} metadata;

/* Upright beyond doubt: the first directory is whole and turns nothing. */
static int exif_is_upright(segment s, metadata *found) {
    const uint8_t *tiff = s.data + 6;
    size_t length = s.length - 6;
    if (length < 8)
        return 0;
    int little = memcmp(tiff, "II*\0", 4) == 0;
    if (!little && memcmp(tiff, "MM\0*", 4) != 0)
        return 0;
    size_t at = tiff_number(tiff + 4, 4, little);
    if (at > length - 2)
        return 0;
    size_t entries = tiff_number(tiff + at, 2, little);
    if (entries * 12 > length - at - 2)
        return 0;
    for (const uint8_t *entry = tiff + at + 2; entries > 0; entries--, entry += 12) {
        if (tiff_number(entry, 2, little) != 0x0112)
            continue;
        unsigned kind = tiff_number(entry + 2, 2, little), count = tiff_number(entry + 4, 4, little);
        if (kind != 3 || count != 1 || tiff_number(entry + 8, 2, little) != 1)
            return 0;
        found->says_upright = 1;
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

/* Segments that would make Pillow turn the image, take another of several, or fail. */
static int application_is_harmless(int marker, segment s, metadata *found) {
    if (marker == APP0 && begins(s, "JFIF", 4))
        return s.length >= 14;
    if (marker == APP1 && begins(s, "Exif\0", 6))
        return ++found->exifs == 1 && exif_is_upright(s, found);
    if (marker == APP1) /* XMP, which counts where Exif is silent */
        found->may_say_otherwise |= mentions(s, "Orientation");
    if (marker == APP2 && begins(s, "ICC_PROFILE", 12))
        return s.length > 14;
    if (marker == APP2)
        return !begins(s, "MPF", 4);
    if (marker == APP14 && begins(s, "Adobe", 5))
        return s.length >= 12;
    return 1;
}

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
            ours = application_is_harmless(marker, s, &found);
        else if (marker >= SOF0 && marker <= SOF2)
            ours = frame_is_ours(marker, s, header);
        else if (marker == SOS) {
            ours = header->components && s.length >= 1;
            ours = ours && (found.says_upright || !found.may_say_otherwise);
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
