/* The header of a JPEG, read strictly: is it a file that the region decoder takes?

   In: a whole file. Out: its size and kind, or REGION_NOT_OURS. Taken is only what is beyond doubt, so that
   this decoder and Pillow never differ: one frame of 8-bit grey or YCbCr/RGB, Huffman coded, upright,
   whose every segment is well formed. */
#include <string.h>

#include "region.h"

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
