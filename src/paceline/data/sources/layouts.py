"""Finds out what a directory holds and opens it as a `Source`.

Shards, class folders, ImageNet's archives, CIFAR-10, idx files, the embedded set or synthetic
images. Anything that is missing fails here, with the path, what was looked for and the remedy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from paceline.core.errors import DataError
from paceline.data.order import SYNTHETIC_STREAM, hash64, to_unit
from paceline.data.settings import DataSettings
from paceline.data.sources.array_sets import Cifar10, IdxFiles, find_idx, find_layout
from paceline.data.sources.base import Source, Split
from paceline.data.sources.folders import (
    METADATA,
    FlatFolder,
    ImageFiles,
    ImageFolder,
    MetadataFolder,
    class_directories,
    flat_images,
    has_images,
)
from paceline.data.sources.labels import is_metadata, numbered_classes, read_classes
from paceline.data.sources.shards import (
    SHARD_SUFFIXES,
    TRAIN_TAR,
    VAL_TAR,
    TarredImages,
    TarShards,
    open_class_tars,
    open_flat_tar,
)
from paceline.data.sources.storage import Retry

# Stripes along both sides and the noise together stay within 255, so no sum needs clipping.
_STRIPE_LEVELS = 80
_NOISE_LEVELS = 95
_NOISE_STARTS = 65_536


class SyntheticImages(Source):
    """Generated images, for speed tests and smoke tests; labels are as balanced as the counts allow.

    Pixels are a function of the index: stripes whose widths and phases depend on the class, under noise
    that depends on the index, so that a model can learn the classes but cannot memorize the images.
    """

    is_in_memory = True

    def __init__(
        self, count: int, classes: int, image_size: int, channels: int, salt: int = 0
    ) -> None:
        """`salt` tells splits apart: the same classes under other noise."""
        self.classes = numbered_classes(classes)
        self.labels = np.arange(count, dtype=np.int64) % classes
        self._shape = (image_size, image_size, channels)
        # Stripes across are grey, stripes along have a phase in each channel: so every addition runs
        # over whole rows of bytes, ten times as fast as over pixels of three.
        self._across = _stripes(classes, 0, image_size, 1)
        self._along = _stripes(classes, 1, image_size, channels)
        # Hashing each pixel of each image would cost more than decoding a JPEG; a window into one
        # long strip of noise costs nothing, and its start is the image's own.
        length = image_size * image_size * channels + _NOISE_STARTS
        strip = hash64(salt, SYNTHETIC_STREAM, 0, np.arange(length))
        self._noise = (to_unit(strip) * _NOISE_LEVELS).astype(np.uint8)
        # All at once: a hash of one number costs more than the rest of a small image.
        starts = hash64(salt, SYNTHETIC_STREAM, 1, np.arange(count))
        self._starts = (starts % np.uint64(_NOISE_STARTS)).astype(np.int64)

    def read(self, i: int) -> npt.NDArray[np.uint8]:
        """Height × width × channels."""
        rows, columns, channels = self._shape
        start = self._starts[i]
        noise = self._noise[start : start + rows * columns * channels].reshape(rows, -1)
        image: npt.NDArray[np.uint8] = noise + self._along[self.labels[i]].reshape(1, -1)
        image += self._across[self.labels[i]]
        return image.reshape(self._shape)

    def name(self, i: int) -> str:
        return f"synthetic:{i}"


def _stripes(classes: int, side: int, length: int, channels: int) -> npt.NDArray[np.uint8]:
    """Classes × length × channels: along one side a wave of one to six periods in each channel."""
    label = np.arange(classes)[:, None, None]
    channel = np.arange(channels)[None, None, :]
    periods = 1 + 5 * to_unit(hash64(0, SYNTHETIC_STREAM, 2, side, label, channel))
    phases = to_unit(hash64(0, SYNTHETIC_STREAM, 3, side, label, channel))
    turns = np.arange(length)[None, :, None] / length * periods + phases
    return ((np.sin(2 * np.pi * turns) + 1) / 2 * _STRIPE_LEVELS).astype(np.uint8)


EMBEDDED = Path(__file__).parent.parent / "embedded"
_LAYOUT = (
    "--data-dir takes a folder with train-*.tar and val-*.tar, with train/<class>/ and val/<class>/, "
    "with CIFAR-10 or with idx files, or with <class>/ alone and --val-split 0.1; the embedded images "
    "are data.source = embedded"
)
_NO_VALIDATION = "add val/<class>/, or use --val-split 0.1 for a tenth of the training images"
# Names of a split's folder, in any case; those of validation in order of preference.
_FOLDERS: dict[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid"),
}
_TEST = "test"


def open_layout(
    settings: DataSettings,
    split: Split,
    classes: Sequence[str] | None = None,
    *,
    keep_index: bool = True,
) -> Source:
    """Opens one split. `classes`, those of the training split, define what the labels mean where
    the data does not say it: a validation split may lack some classes. Without `keep_index` nothing
    is written beside the data."""
    if settings.source == "synthetic":
        return _synthetic(settings, split)
    if settings.source == "embedded":
        return _shards(EMBEDDED, split, classes, Retry(0), keep_index)
    if settings.source == "python":
        raise DataError(
            "the data was given as a Python object, which the settings cannot open",
            "use the program that made it, or give --data-dir",
        )
    if not settings.dir:
        # Never the embedded set in place of somebody's forgotten --data-dir.
        raise DataError("no data: data.dir is not set", _LAYOUT)
    directory = Path(settings.dir).expanduser()
    _check_directory(directory)
    kind = settings.source if settings.source != "auto" else detect(directory, split)
    retry = Retry()
    if kind == "shards":
        return _shards(directory, split, classes, retry, keep_index)
    if kind == "cifar10":
        return Cifar10(directory, split)
    if kind == "idx":
        return IdxFiles(directory, split, classes)
    if kind == "imagenet":
        return _imagenet(directory, split, classes, retry)
    return _folder(directory, split, classes, retry)


Kind = Literal["shards", "folder", "cifar10", "idx", "imagenet"]
_IMAGENET_TARS = {"train": TRAIN_TAR, "val": VAL_TAR}


def kinds_of(directory: Path, split: Split) -> dict[Kind, str]:
    """What `directory` holds of `split`, and the sign by which that was seen."""
    signs: dict[Kind, tuple[str, bool]] = {
        "shards": (f"{split}-*.tar", bool(shard_paths(directory, split))),
        "folder": (f"{split}/", split_folder(directory, split) is not None),
        "cifar10": ("CIFAR-10", find_layout(directory, split) is not None),
        "idx": ("idx files", find_idx(directory, split, "images-idx3") is not None),
        "imagenet": (_IMAGENET_TARS[split], (directory / _IMAGENET_TARS[split]).is_file()),
    }
    return {kind: sign for kind, (sign, there) in signs.items() if there}


def detect(directory: Path, split: Split) -> Kind:
    """The one kind that `directory` holds; several or none is for the user to decide."""
    found = kinds_of(directory, split)
    if len(found) > 1:
        raise DataError(
            f"{directory}: holds {' and '.join(found.values())}",
            f"set data.source = {' or '.join(map(repr, found))}",
        )
    for kind in found:
        return kind
    if split == "train" and is_unsplit(directory):
        return "folder"
    missing_validation = split == "val" and (kinds_of(directory, "train") or is_unsplit(directory))
    if not missing_validation:
        _check_class_folders(directory)
    raise DataError(
        f"{directory}: neither {split}-*.tar[.gz] nor {split}/<class>/ nor CIFAR-10 nor idx files "
        "in it",
        _NO_VALIDATION if missing_validation else _LAYOUT,
    )


def split_folder(directory: Path, split: Split) -> Path | None:
    """The folder of a split by its usual names, in any case; `test` where nothing else is there to
    validate on. DataError where two folders could be meant."""
    try:
        with os.scandir(directory) as entries:
            here = sorted(e.name for e in entries if e.is_dir())
    except OSError:
        return None
    found = [name for name in here if name.lower() in _FOLDERS[split]]
    if split == "val" and not found:
        found = [name for name in here if name.lower() == _TEST]
    if len(found) > 1:
        raise DataError(
            f"{directory}: holds {' and '.join(f'{name}/' for name in found)}",
            f"keep one of them for {'training' if split == 'train' else 'validation'}",
        )
    return directory / found[0] if found else None


def is_unsplit(directory: Path) -> bool:
    """Class folders without a folder for each split, or images with `metadata.csv`."""
    if any(split_folder(directory, split) for split in ("train", "val")):
        return False
    if is_metadata(directory / METADATA):
        return True
    folders = iter(class_directories(directory))
    # Two: any folder has folders, and a picture somewhere below one of them.
    return sum(1 for name in folders if has_images(directory, name)) > 1


def _check_class_folders(directory: Path) -> None:
    """DataError where `directory` is almost a folder of class folders: one class, or none."""
    if any(split_folder(directory, split) for split in ("train", "val")):
        return
    classes = [name for name in class_directories(directory) if has_images(directory, name)]
    if len(classes) == 1:
        raise DataError(
            f"only one class ({classes[0]}) in {directory}",
            f"training needs two: add a folder {directory}/<class>/ of another",
        )
    if not classes and (images := flat_images(directory)):
        raise DataError(
            f"{len(images)} image{'s lie' if len(images) > 1 else ' lies'} directly in {directory}",
            f"put images into class folders, {directory}/<class>/",
        )


def has_validation(settings: DataSettings) -> str:
    """The sign of a validation set, empty where there is none."""
    if settings.source in ("synthetic", "embedded"):
        return f"data.source = {settings.source}"
    found = kinds_of(Path(settings.dir).expanduser(), "val")
    if settings.source == "auto":
        return " and ".join(found.values())
    return "".join(sign for kind, sign in found.items() if kind == settings.source)


def _check_directory(directory: Path) -> None:
    try:
        empty = not any(directory.iterdir())
    except NotADirectoryError:
        raise DataError(f"{directory}: is a file, not a directory", _LAYOUT) from None
    except FileNotFoundError:
        raise DataError(f"{directory}: no such directory", _LAYOUT) from None
    except OSError as error:
        raise DataError(f"{directory}: cannot be listed ({error.strerror})", _LAYOUT) from None
    if empty:
        raise DataError(f"{directory}: is empty", _LAYOUT)


def shard_paths(directory: Path, split: Split) -> list[Path]:
    return sorted(
        path for path in directory.glob(f"{split}-*") if path.name.endswith(SHARD_SUFFIXES)
    )


def _shards(
    directory: Path, split: Split, classes: Sequence[str] | None, retry: Retry, keep_index: bool
) -> TarShards:
    paths = shard_paths(directory, split)
    if not paths:
        raise DataError(f"{directory}: no {split}-*.tar[.gz] in it", _LAYOUT)
    return TarShards(paths, read_classes(directory) or classes, retry, keep_index)


def _folder(directory: Path, split: Split, classes: Sequence[str] | None, retry: Retry) -> Source:
    """Class folders; else a tar for each class; else images with a label file."""
    root = split_folder(directory, split)
    if root is None and split == "train" and is_unsplit(directory):
        root = directory
    if root is None:
        if split == "train":
            _check_class_folders(directory)
        remedy = _LAYOUT if split == "train" else _NO_VALIDATION
        raise DataError(f"{directory}: no {split}/<class>/ in it", remedy)
    if classes is None and split != "train":
        training = split_folder(directory, "train")
        classes = None if training is None else _training_classes(training)
    source = _split_source(directory, root, classes, retry)
    if root.name.lower() == _TEST and isinstance(source, ImageFiles):
        source.add_note(f"{root.name}/ is the validation set: there is no val/ or validation/")
    return source


def _split_source(
    directory: Path, root: Path, classes: Sequence[str] | None, retry: Retry
) -> Source:
    if is_metadata(root / METADATA):
        return MetadataFolder(root, classes, retry)
    folders, tars = class_directories(root), _tars(root)
    # Tars kept beside what was extracted from them do no harm; one without its folder does.
    if folders and (lonely := [tar for tar in tars if tar.stem not in folders]):
        raise DataError(
            f"{root}: holds class folders ({folders[0]}) and tars without one ({lonely[0].name})",
            "extract it, or move tars or folders elsewhere: which of them is the data set?",
        )
    if folders:
        return ImageFolder(root, classes, retry)
    if tars:
        return open_class_tars(tars, classes, retry)
    if flat_images(root):
        return FlatFolder(root, classes or read_classes(directory), retry)
    return ImageFolder(root, classes, retry)


def _imagenet(
    directory: Path, split: Split, classes: Sequence[str] | None, retry: Retry
) -> TarredImages:
    path = directory / _IMAGENET_TARS[split]
    if split == "train":
        return open_class_tars([path], classes, retry)
    return open_flat_tar(path, classes or read_classes(directory), retry)


def _training_classes(root: Path) -> list[str] | None:
    """What the training split calls its classes; folders without images are none."""
    if is_metadata(root / METADATA):
        return list(MetadataFolder(root, None).classes)
    folders = [name for name in class_directories(root) if has_images(root, name)]
    return folders or [path.stem for path in _tars(root)] or None


def _tars(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("*.tar") if not path.name.startswith("."))


def _synthetic(settings: DataSettings, split: Split) -> SyntheticImages:
    """Validation has a tenth as many, at least one."""
    training = split == "train"
    return SyntheticImages(
        count=settings.synthetic_samples if training else max(1, settings.synthetic_samples // 10),
        classes=settings.synthetic_classes,
        image_size=settings.image_size,
        channels=settings.channels,
        salt=0 if training else 1,
    )
