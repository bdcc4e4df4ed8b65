"""Region decoding: only the part of a JPEG that becomes pixels is decoded, by a small C library.

In: an encoded JPEG and a box. Out: the very pixels that Pillow gives. The library is optional: it is
compiled on first use, where there are a C compiler and libjpeg-turbo's headers.
"""
