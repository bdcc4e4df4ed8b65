"""`IdxFiles`: a data set in the idx files of MNIST and its successors.

Takes `train-images-idx3-ubyte` and `train-labels-idx1-ubyte` (validation: `t10k-…`), plain or
`.gz`, also spelled `.idx3-ubyte`. Headers are checked before anything is believed: no file makes us
read or unpack more than it should hold.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError
from paceline.data.randomness import Int64
from paceline.data.sources.base import Source, Split
from paceline.data.sources.labels import numbered_classes, read_classes

_STEMS = {"train": "train", "val": "t10k"}
_UNSIGNED_BYTE = 8
_LIMIT_BYTES = 8 << 30
_PIECE_BYTES = 16 << 20
_REMEDY = "fetch the file again"


class IdxFiles(Source):
    """All pixels of a split in memory, samples × height × width × 1."""

    is_in_memory = True
    pixels: npt.NDArray[np.uint8]

    def __init__(
        self,
        directory: Path,
        split: Split,
        classes: Sequence[str] | None = None,
    ) -> None:
        images, labels = (
            find_idx(directory, split, "images-idx3"),
            find_idx(directory, split, "labels-idx1"),
        )
        if images is None or labels is None:
            missing = "images-idx3" if images is None else "labels-idx1"
            raise DataError(
                f"{directory}: no {_STEMS[split]}-{missing}-ubyte[.gz] in it",
                "idx files are train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-…",
            )
        self._path = images
        self.pixels = read_idx(images, 3)[..., None]
        self.labels: Int64 = read_idx(labels, 1).astype(np.int64)
        if len(self.labels) != len(self.pixels):
            raise DataError(
                f"{labels}: {len(self.labels)} labels for {len(self.pixels)} images", _REMEDY
            )
        if not len(self.labels) or not self.pixels[0].size:
            raise DataError(f"{images}: holds no image", _REMEDY)
        highest = int(self.labels.max())
        known = read_classes(directory) or classes
        self.classes: Sequence[str] = numbered_classes(highest + 1) if known is None else known
        if highest >= len(self.classes):
            raise DataError(
                f"{labels}: label {highest} is outside the {len(self.classes)} classes", _REMEDY
            )

    def read(self, i: int) -> npt.NDArray[np.uint8]:
        """Height × width × 1."""
        image: npt.NDArray[np.uint8] = self.pixels[i]
        return image

    def name(self, i: int) -> str:
        return f"{self._path}:{i}"


def find_idx(directory: Path, split: Split, part: str) -> Path | None:
    """The file of that part under any of its usual names; the plain one before the packed one."""
    for name in (
        f"{_STEMS[split]}-{part}-ubyte",
        f"{_STEMS[split]}-{part}-ubyte".replace("-idx", ".idx"),
    ):
        for suffix in ("", ".gz"):
            path = directory / (name + suffix)
            if path.is_file():
                return path
    return None


def read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """The array of bytes in an idx file of so many dimensions."""
    header_bytes = 4 + 4 * dimensions
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            header = file.read(header_bytes)
            if len(header) < header_bytes or header[:4] != bytes(
                [0, 0, _UNSIGNED_BYTE, dimensions]
            ):
                raise DataError(
                    f"{path}: no idx file of unsigned bytes in {dimensions} dimensions "
                    f"(begins with {header[:4].hex(' ')})",
                    _REMEDY,
                )
            shape = [
                int.from_bytes(header[4 + 4 * k : 8 + 4 * k], "big") for k in range(dimensions)
            ]
            size = math.prod(shape)
            if size > _LIMIT_BYTES:
                raise DataError(f"{path}: claims {size:,} bytes of pixels", _REMEDY)
            # One byte more than it should hold shows a file that is too long. Piece by piece: a header
            # may claim gigabytes that the file does not hold.
            content = bytearray()
            while len(content) <= size:
                piece = file.read(min(_PIECE_BYTES, size + 1 - len(content)))
                if not piece:
                    break
                content += piece
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: not a readable gzip file ({error})", _REMEDY) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})", "check the file") from None
    if len(content) != size:
        found = "more" if len(content) > size else f"{len(content):,}"
        raise DataError(f"{path}: {found} bytes after the header, which says {size:,}", _REMEDY)
    return np.frombuffer(content, np.uint8).reshape(shape)
