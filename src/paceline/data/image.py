"""Decoding by Pillow: from the bytes of a file to upright 8-bit pixels, and what its header says.

Takes JPEG, PNG, WebP, and GIF or BMP under a wrong name. Whatever Pillow cannot decode to its end
is `CorruptImage` with its reason, never a warning; `CorruptSample` is the sample of a data set that has
such an image. Damage that still decodes goes unnoticed.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError, WebPImagePlugin  # noqa: F401  (WebP registers itself)

MODES = {1: "L", 3: "RGB"}
GREY_MODES = ("1", "L", "LA", "La")
UNKNOWN = "unknown"
_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Where metadata that may carry an orientation lies; most training images have neither.
_METADATA = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif")

Image.preinit()
# Named formats spare Pillow the import of forty others whenever a file is none of them.
_FORMATS = tuple(name for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP") if name in Image.OPEN)
_PILLOW_QUIET = ("ignore", None, Warning, re.compile(r"PIL\."), 0)


class CorruptImage(Exception):  # noqa: N818  (a property of the file, not a failure of ours)
    """The bytes are no image that can be decoded whole; `str()` says why."""


@dataclass(frozen=True)
class CorruptSample:
    """A sample that was replaced (training) or left out (evaluation)."""

    index: int
    name: str
    reason: str


def allowed_corrupt(share: float, samples: int) -> int:
    """How many of `samples` may be corrupt: their share, but at least one, unless `share` is 0."""
    return max(1, int(share * samples)) if share > 0 else 0


def decode(data: bytes | npt.NDArray[np.uint8], channels: int) -> Image.Image:
    """The image upright, in the mode of `channels`. Transparency is dropped, not blended."""
    mode = MODES[channels]
    if isinstance(data, np.ndarray):
        return to_mode(Image.fromarray(data[:, :, 0] if data.shape[2] == 1 else data), mode)
    _quieten_pillow()
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=_FORMATS)
        image.load()
        return to_mode(_upright(image), mode)
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes make Pillow raise almost anything
        raise CorruptImage(_reason(data, error)) from error


def to_mode(image: Image.Image, mode: str) -> Image.Image:
    """In 8 bits; of 16-bit values the upper byte."""
    if image.mode == mode:
        return image
    if image.mode.startswith("I"):
        # Pillow clips 16-bit values at 255; their upper byte is what is meant.
        values = np.clip(np.asarray(image), 0, 65_535) // 256
        image = Image.fromarray(values.astype(np.uint8))
    elif image.mode in ("P", "PA") and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert(mode)


def _upright(image: Image.Image) -> Image.Image:
    """Turns the image as its camera meant it. Unreadable metadata does not spoil good pixels."""
    if not any(name in image.info for name in _METADATA):
        return image
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG)
    except (OSError, SyntaxError, ValueError, TypeError, LookupError, struct.error):
        return image
    method = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if method is None else image.transpose(method)


def _reason(data: bytes, error: Exception) -> str:
    if not data:
        return "empty file"
    if data[:4] in (b"II*\0", b"MM\0*"):
        return "a TIFF image, which is not read: convert it to PNG"
    if isinstance(error, UnidentifiedImageError):
        return f"not a JPEG, PNG, WebP, GIF or BMP image (begins with {data[:4].hex(' ')})"
    return " ".join(str(error).split()) or type(error).__name__


def _quieten_pillow() -> None:
    """Keeps Pillow's warnings about odd files off the terminal, and off `-W error`.

    `catch_warnings` swaps a global list and so breaks when threads overlap; a filter of our own at
    the head of the list does not, and comes back should someone else's swap have dropped it.
    """
    if not warnings.filters or warnings.filters[0] != _PILLOW_QUIET:
        warnings.filterwarnings("ignore", module=r"PIL\.")


@dataclass(frozen=True)
class ImageFacts:
    """`format` is Pillow's name, or `pixels`; `unknown` where the header cannot be read."""

    format: str
    mode: str
    width: int = 0
    height: int = 0

    @property
    def channels(self) -> int:
        """In which the image loses no colour: 1 for grey of any depth, else 3."""
        return 1 if self.mode in GREY_MODES or self.mode.startswith("I") else 3


def image_facts(data: bytes | npt.NDArray[np.uint8]) -> ImageFacts:
    """Never fails: what is wrong with damaged bytes is the decoder's to say."""
    if isinstance(data, np.ndarray):
        height, width, channels = data.shape
        return ImageFacts("pixels", "L" if channels == 1 else "RGB", width, height)
    try:
        with Image.open(io.BytesIO(data)) as image:
            return ImageFacts(str(image.format), image.mode, *image.size)
    except Exception:  # noqa: BLE001 - damaged bytes make Pillow raise almost anything
        return ImageFacts(UNKNOWN, UNKNOWN)
