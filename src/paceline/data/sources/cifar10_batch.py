"""One file of CIFAR-10, in any of its three published forms.

In: a sheet (PNG, an image a row of 1,024 pixels), a `.bin` (label byte, then the planes red, green,
blue) or a pickle of the Python version. Out: samples × 32 × 32 × 3 in uint8, and the labels where the
file has them. A file that is cut off, of another size or of another kind is a `DataError`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError
from paceline.core.untrusted import ParseError, parse_json
from paceline.data.decoding.decode import CorruptImage, decode
from paceline.data.randomness import Int64
from paceline.data.sources.pickled_batch import read_pickled_batch

Pixels = npt.NDArray[np.uint8]
SIDE, CHANNELS, CLASSES = 32, 3, 10
_PIXELS = SIDE * SIDE
_BYTES = CHANNELS * _PIXELS
_REMEDY = "fetch the file again"


def read_sheet(path: Path) -> Pixels:
    """A row of the sheet is an image, its pixels line after line."""
    try:
        sheet = np.asarray(decode(_content(path), CHANNELS))
    except CorruptImage as error:
        raise DataError(f"{path}: cannot be decoded ({error})", _REMEDY) from None
    if sheet.shape[1] != _PIXELS:
        raise DataError(
            f"{path}: {sheet.shape[1]} pixels wide, a sheet of CIFAR-10 is {_PIXELS}", _REMEDY
        )
    return sheet.reshape(-1, SIDE, SIDE, CHANNELS)


def read_labels(path: Path) -> Int64:
    """A JSON list of class indices."""
    try:
        values = parse_json(_content(path))
    except ParseError as error:
        raise DataError(f"{path}: is not JSON ({error})", _REMEDY) from None
    if not isinstance(values, list):
        raise DataError(f"{path}: is not a list of labels", _REMEDY)
    return _checked(values, path)


def read_binary(path: Path) -> tuple[Pixels, Int64]:
    content = np.frombuffer(_content(path), dtype=np.uint8)
    if not content.size or content.size % (1 + _BYTES):
        raise DataError(
            f"{path}: {content.size} bytes, not a whole number of images of {1 + _BYTES}", _REMEDY
        )
    rows = content.reshape(-1, 1 + _BYTES)
    return _interleaved(rows[:, 1:]), _checked(rows[:, 0].tolist(), path)


def read_pickle(path: Path) -> tuple[Pixels, Int64]:
    try:
        shape, content, labels = read_pickled_batch(_content(path))
    except ValueError as error:
        raise DataError(f"{path}: {error}", f"{_REMEDY}, or the binary version") from None
    if shape != (len(labels), _BYTES) or len(content) != len(labels) * _BYTES or not labels:
        raise DataError(
            f"{path}: an array of shape {shape} in {len(content)} bytes for {len(labels)} labels",
            _REMEDY,
        )
    planes = np.frombuffer(content, dtype=np.uint8).reshape(shape)
    return _interleaved(planes), _checked(labels, path)


def _interleaved(planes: Pixels) -> Pixels:
    """From plane after plane to pixel after pixel."""
    return np.ascontiguousarray(
        planes.reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1)
    )  # fmt: skip


def _checked(values: list[int], path: Path) -> Int64:
    for position, value in enumerate(values):
        if type(value) is not int or not 0 <= value < CLASSES:
            raise DataError(
                f"{path}: label {value!r} at position {position}, not 0 to {CLASSES - 1}", _REMEDY
            )
    return np.array(values, dtype=np.int64)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"{path}: is missing", "CIFAR-10 is complete or it is not CIFAR-10"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})", "check the file") from None
