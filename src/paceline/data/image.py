"""Decodes image files with Pillow to upright 8-bit images, and reads their headers.

Reads JPEG, PNG, WebP, GIF and BMP, regardless of the file name. If Pillow cannot decode a file
completely, `CorruptImage` is raised with the reason. A damaged file that Pillow decodes without an
error is not detected.
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
# Keys in `Image.info` of metadata that may contain an orientation. Most training images have none.
_METADATA = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif")

Image.preinit()
# Without names, Pillow would import forty other plugins for a file of unknown format.
_FORMATS = tuple(name for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP") if name in Image.OPEN)
_PILLOW_QUIET = ("ignore", None, Warning, re.compile(r"PIL\."), 0)


class CorruptImage(Exception):  # noqa: N818  (a property of the file)
    """Raised if bytes cannot be decoded to a complete image; the message gives the reason.

    Example:
        >>> raise CorruptImage("empty file")  # doctest: +SKIP
    """


@dataclass(frozen=True)
class CorruptSample:
    """A sample with a corrupt image, which is replaced in training and left out in evaluation."""

    index: int
    name: str
    reason: str


def allowed_corrupt(share: float, samples: int) -> int:
    """Returns how many of `samples` may be corrupt: the fraction `share`, at least 1 if above 0."""
    return max(1, int(share * samples)) if share > 0 else 0


def decode(data: bytes | npt.NDArray[np.uint8], channels: int) -> Image.Image:
    """Decodes an image to an upright grayscale or RGB image. Drops transparency.

    Args:
        data: The bytes of an image file, or pixels as height × width × channels.
        channels: 1 for grayscale, 3 for RGB.

    Raises:
        CorruptImage: If the file cannot be decoded completely.
    """
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
    """Converts an image to the 8-bit mode "L" or "RGB". Of 16-bit values, keeps the upper byte."""
    if image.mode == mode:
        return image
    if image.mode.startswith("I"):
        # Pillow would clip 16-bit values at 255.
        values = np.clip(np.asarray(image), 0, 65_535) // 256
        image = Image.fromarray(values.astype(np.uint8))
    elif image.mode in ("P", "PA") and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert(mode)


def _upright(image: Image.Image) -> Image.Image:
    """Rotates or flips an image as its metadata says. Ignores unreadable metadata."""
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
        return "TIFF images are not supported: convert it to PNG"
    if isinstance(error, UnidentifiedImageError):
        return f"not a JPEG, PNG, WebP, GIF or BMP image (begins with {data[:4].hex(' ')})"
    return " ".join(str(error).split()) or type(error).__name__


def _quieten_pillow() -> None:
    """Ignores Pillow's warnings about unusual files from now on.

    `catch_warnings` replaces a global list and is not thread-safe. This function puts a filter at
    the head of that list, also if other code has removed the filter.
    """
    if not warnings.filters or warnings.filters[0] != _PILLOW_QUIET:
        warnings.filterwarnings("ignore", module=r"PIL\.")


@dataclass(frozen=True)
class ImageFacts:
    """Format, mode and size of an image.

    `format` is Pillow's name of the format, `pixels` for an array, or `unknown` if the header is
    unreadable.
    """

    format: str
    mode: str
    width: int = 0
    height: int = 0

    @property
    def channels(self) -> int:
        """1 for a grayscale image, else 3."""
        return 1 if self.mode in GREY_MODES or self.mode.startswith("I") else 3


def image_facts(data: bytes | npt.NDArray[np.uint8]) -> ImageFacts:
    """Reads the header of an image. Does not raise for damaged files."""
    if isinstance(data, np.ndarray):
        height, width, channels = data.shape
        return ImageFacts("pixels", "L" if channels == 1 else "RGB", width, height)
    _quieten_pillow()
    _quieten_pillow()
    try:
        with Image.open(io.BytesIO(data)) as image:
            return ImageFacts(str(image.format), image.mode, *image.size)
    except Exception:  # noqa: BLE001 - damaged bytes make Pillow raise almost anything
        return ImageFacts("unknown", "unknown")
