"""Detects the kind of data in a directory and opens it as a `Source`.

A directory contains shards, class folders, CIFAR-10 or idx files. If a file or folder is
missing, the error names the path, the expected content, and the remedy.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from paceline.core.errors import DataError
from paceline.data.settings import DataSettings
from paceline.data.sources.array_sets import Cifar10, IdxFiles, find_idx, find_layout
from paceline.data.sources.base import Source, Split
from paceline.data.sources.classes import read_classes
from paceline.data.sources.folders import (
    FlatFolder,
    ImageFiles,
    ImageFolder,
    MetadataFolder,
    class_directories,
    flat_images,
    has_images,
)
from paceline.data.sources.index_store import open_shards
from paceline.data.sources.labels import ANNOTATIONS, KAGGLE_FOLDER, find_metadata
from paceline.data.sources.pack_manifest import check_packed
from paceline.data.sources.registry import SourceKind
from paceline.data.sources.shards import TarShards
from paceline.data.sources.storage import Retry

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")
_LAYOUT = (
    "--data-dir takes a folder with train-*.tar and val-*.tar, with train/<class>/ and val/<class>/, "
    "with CIFAR-10 or with idx files, or with <class>/ alone and --val-split 0.1 (docs/data.md); a "
    "Dataset for pl.Trainer(data=…) reads other formats; the embedded images are data.source = embedded"
)
_NO_VALIDATION = "add val/<class>/, or use --val-split 0.1 for a tenth of the training images"
# Names of the folder of each split, in upper or lower case, in order of preference.
_FOLDERS: dict[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid"),
}
_TEST = "test"


def open_layout(
    settings: DataSettings,
    split: Split,
    classes: Sequence[str] | None = None,
    keep_index: bool = True,
) -> Source:
    """Opens one split of the directory `data.dir`.

    Args:
        settings: Settings with the directory and the kind of data.
        split: The split to open.
        classes: Class names of the training split. The validation split may have fewer classes.
        keep_index: Allows writing the indexes of shards to disk.

    Raises:
        DataError: If the split is missing, incomplete or damaged.
    """
    if not settings.dir:
        raise DataError("no data: data.dir is not set", _LAYOUT)
    directory = data_root(settings.dir)
    _check_directory(directory)
    if settings.source == "shards" or (settings.source == "auto" and shard_paths(directory, split)):
        check_packed(directory, split)
    kind = settings.source if settings.source != "auto" else detect(directory, split)
    retry = Retry()
    if kind == "shards":
        return _shards(directory, split, classes, retry, keep_index)
    if kind == "cifar10":
        return Cifar10(directory, split)
    if kind == "idx":
        return IdxFiles(directory, split, classes)
    return _folder(directory, split, classes, retry)


Kind = Literal["shards", "folder", "cifar10", "idx"]


def data_root(directory: str) -> Path:
    """Returns the folder that contains the splits: `directory`, or a subfolder for Kaggle's ImageNet."""
    root = Path(directory).expanduser()
    return root / KAGGLE_FOLDER if (root / KAGGLE_FOLDER).is_dir() else root


def kinds_of(directory: Path, split: Split) -> dict[Kind, str]:
    """Returns the kinds of data in `directory` for `split`, each with the file or folder it has."""
    shards, folder = shard_paths(directory, split), split_folder(directory, split)
    inside = bool(shards) and shards[0].parent == folder
    shard_pattern = f"{shards[0].parent.name}/*.tar" if inside else f"{split}-*.tar"
    evidence: dict[Kind, tuple[str, bool]] = {
        "shards": (shard_pattern, bool(shards)),
        "folder": (f"{split}/", folder is not None and not inside),
        "cifar10": ("CIFAR-10", find_layout(directory, split) is not None),
        "idx": ("idx files", find_idx(directory, split, "images-idx3") is not None),
    }
    return {kind: text for kind, (text, present) in evidence.items() if present}


def detect(directory: Path, split: Split) -> Kind:
    """Returns the kind of data in `directory`. Raises DataError if there is none or more than one."""
    kinds = kinds_of(directory, split)
    if len(kinds) > 1:
        raise DataError(
            f"{directory}: has data of several kinds: {' and '.join(kinds.values())}",
            f"set data.source = {' or '.join(map(repr, kinds))}",
        )
    for kind in kinds:
        return kind
    unsplit = is_unsplit(directory)
    if split == "train" and unsplit:
        return "folder"
    missing_validation = split == "val" and (unsplit or kinds_of(directory, "train"))
    if not missing_validation:
        _check_unsplit(directory)
    raise DataError(
        f"{directory}: neither {split}-*.tar[.gz] nor {split}/<class>/ nor CIFAR-10 nor idx files "
        "in it",
        _NO_VALIDATION if missing_validation else _LAYOUT,
    )


def split_folder(directory: Path, split: Split) -> Path | None:
    """Returns the folder of a split, or None if there is none.

    Names may be in upper or lower case. The folder `test` is used for validation only if there is
    no other validation folder.

    Raises:
        DataError: If more than one folder could be the split.
    """
    try:
        with os.scandir(directory) as entries:
            folders = sorted(e.name for e in entries if e.is_dir())
    except OSError:
        return None
    names = [name for name in folders if name.lower() in _FOLDERS[split]]
    if split == "val" and not names:
        names = [name for name in folders if name.lower() == _TEST]
    if len(names) > 1:
        raise DataError(
            f"{directory}: has {' and '.join(f'{name}/' for name in names)}",
            f"keep one of them for {'training' if split == 'train' else 'validation'}",
        )
    return directory / names[0] if names else None


def _has_split_folder(directory: Path) -> bool:
    return any(split_folder(directory, split) for split in ("train", "val"))


def is_unsplit(directory: Path) -> bool:
    """Returns True if `directory` has class folders or images with metadata, but no split folders."""
    if _has_split_folder(directory):
        return False
    if find_metadata(directory):
        return True
    names = (name for name in class_directories(directory) if has_images(directory, name))
    # Requires two class folders, because any folder might have one subfolder with a picture.
    first = list(itertools.islice(names, 2))
    # A folder with both splits is a data set, and thus not a class folder.
    split = (all(split_folder(directory / name, s) for s in ("train", "val")) for name in first)
    return len(first) > 1 and not any(split)


def _check_unsplit(directory: Path) -> None:
    """Raises DataError for common mistakes in a directory without split folders."""
    if _has_split_folder(directory):
        return
    if unnamed := [path.name for path in all_shards(directory) if not path.name.endswith("gz")]:
        raise DataError(
            f"{directory}: the names of its tars do not have a split ({unnamed[0]})",
            "name shards train-0000.tar and val-0000.tar, or put them into folders train/ and val/",
        )
    classes = [name for name in class_directories(directory) if has_images(directory, name)]
    for below in (directory / name for name in class_directories(directory)):
        has_splits = below.name in classes and (_has_split_folder(below) or is_unsplit(below))
        if has_splits or shard_paths(below, "train"):
            raise DataError(
                f"{directory}: the data set is in a folder below it", f"use --data-dir {below}"
            )
    if len(classes) == 1:
        raise DataError(
            f"only one class ({classes[0]}) in {directory}",
            f"training needs two: add a folder {directory}/<class>/ of another class",
        )
    if not classes and (images := flat_images(directory)):
        raise DataError(
            f"images without class folders in {directory} ({len(images)} files)",
            f"put images into class folders, {directory}/<class>/",
        )


def has_validation(settings: DataSettings) -> str:
    """Returns a text that names the validation set in the data directory, or "" if there is none."""
    kinds = kinds_of(data_root(settings.dir), "val")
    if settings.source == "auto":
        return " and ".join(kinds.values())
    return "".join(text for kind, text in kinds.items() if kind == settings.source)


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


# Matches train-0000.tar, imagenet1k-validation-00.tar and set_train_0.tar, but not train.tar, which is an
# archive of a folder `train/`.
_SPLIT_IN_NAME = re.compile(r"(?:^|[-_.])(train|training|val|validation|valid|test)[-_.]", re.I)


def shard_paths(directory: Path, split: Split) -> list[Path]:
    """Returns the shards whose file names contain the split, or else the shards in the split's folder.

    Shards named `test` are used for validation only if there are no other validation shards.
    """
    named: dict[str, list[Path]] = {}
    for path in all_shards(directory):
        named.setdefault(_split_word(path), []).append(path)
    paths = [path for name in _FOLDERS[split] for path in named.get(name, ())]
    if split == "val" and not paths:
        paths = named.get(_TEST, [])
    return sorted(paths) or _shards_inside(split_folder(directory, split))


def _split_word(path: Path) -> str:
    """Returns the part of a shard's file name that names the split, or ""."""
    suffix = next(suffix for suffix in SHARD_SUFFIXES if path.name.endswith(suffix))
    match = _SPLIT_IN_NAME.search(path.name.removesuffix(suffix))
    return match[1].lower() if match else ""


def all_shards(directory: Path) -> list[Path]:
    """Returns the tars in `directory` that could be shards of any split."""
    try:
        with os.scandir(directory) as entries:
            names = [e.name for e in entries if e.name.endswith(SHARD_SUFFIXES)]
    except OSError:
        return []
    return sorted(directory / name for name in names if not name.startswith((".", "ILSVRC")))


def _shards_inside(folder: Path | None) -> list[Path]:
    """Returns the tars in the folder of a split, or nothing if the folder also has class folders."""
    if folder is None or class_directories(folder):
        return []
    return all_shards(folder)


def _shards(
    directory: Path, split: Split, classes: Sequence[str] | None, retry: Retry, keep_index: bool
) -> TarShards:
    paths = shard_paths(directory, split)
    if not paths:
        raise DataError(f"{directory}: no {split}-*.tar[.gz] in it", _LAYOUT)
    known = read_classes(directory) or read_classes(paths[0].parent) or classes
    source = open_shards(paths, known, retry, keep_index)
    word = _split_word(paths[0]) if paths[0].parent == directory else paths[0].parent.name.lower()
    if split == "val" and word == _TEST:
        source.add_note(
            "the shards of test are the validation set, as there are none of val or validation"
        )
    return source


def _folder(directory: Path, split: Split, classes: Sequence[str] | None, retry: Retry) -> Source:
    """Opens a split whose images are in class folders, or in one folder with labels in a file."""
    root = split_folder(directory, split)
    if root is None and split == "train" and is_unsplit(directory):
        root = directory
    if root is None:
        if split == "train":
            _check_unsplit(directory)
        remedy = _LAYOUT if split == "train" else _NO_VALIDATION
        raise DataError(f"{directory}: no {split}/<class>/ in it", remedy)
    if classes is None and split != "train":
        training = split_folder(directory, "train")
        classes = None if training is None else _training_classes(training)
    source = _split_source(directory, root, classes, retry)
    if root.name.lower() == _TEST and isinstance(source, ImageFiles):
        source.add_note(f"{root.name}/ is the validation set, as there is no val/ or validation/")
    return source


def _split_source(
    directory: Path, root: Path, classes: Sequence[str] | None, retry: Retry
) -> Source:
    if find_metadata(root):
        return MetadataFolder(root, classes, retry)
    folders = class_directories(root)
    if folders == ["images"] and (root / ANNOTATIONS).is_file():
        return FlatFolder(root / "images", classes or read_classes(directory), retry)
    if folders:
        return ImageFolder(root, classes, retry)
    if flat_images(root):
        return FlatFolder(root, classes or read_classes(directory), retry)
    return ImageFolder(root, classes, retry)


def _training_classes(root: Path) -> list[str] | None:
    """Returns the class names of the training split: the names of all folders with images."""
    if find_metadata(root):
        return list(MetadataFolder(root, None).classes)
    folders = [name for name in class_directories(root) if has_images(root, name)]
    return folders or None


KIND = SourceKind(open_layout, has_validation)
