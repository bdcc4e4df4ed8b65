"""Finds out what a directory holds and opens it as a `Source`.

Shards, class folders, ImageNet's archives, CIFAR-10 or idx files. Anything that is missing fails here,
with the path, what was looked for and the remedy.
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
from paceline.data.sources.archives import (
    TRAIN_TAR,
    VAL_TAR,
    TarredImages,
    open_class_tars,
    open_flat_tar,
)
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
from paceline.data.sources.formats import check_format, check_level, level_error
from paceline.data.sources.index_store import open_shards
from paceline.data.sources.labels import ANNOTATIONS, KAGGLE_FOLDER, find_metadata
from paceline.data.sources.pack_manifest import check_packed
from paceline.data.sources.registry import SourceKind
from paceline.data.sources.shards import TarShards
from paceline.data.sources.storage import Retry
from paceline.data.sources.tar_index import is_shard

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz")
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
    keep_index: bool = True,
) -> Source:
    """Opens one split. `classes`, those of the training split, define what the labels mean where
    the data does not say it: a validation split may lack some classes. Without `keep_index` nothing
    is written beside the data. DataError also for an unfinished or incomplete pack."""
    if not settings.dir:
        # Never the embedded set in place of somebody's forgotten --data-dir.
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
    if kind == "imagenet":
        return _imagenet(directory, split, classes, retry)
    return _folder(directory, split, classes, retry)


Kind = Literal["shards", "folder", "cifar10", "idx", "imagenet"]
_IMAGENET_TARS = {"train": TRAIN_TAR, "val": VAL_TAR}


def data_root(directory: str) -> Path:
    """The folder of the splits: `directory`, or the one that Kaggle's ImageNet has in it."""
    root = Path(directory).expanduser()
    return root / KAGGLE_FOLDER if (root / KAGGLE_FOLDER).is_dir() else root


def kinds_of(directory: Path, split: Split) -> dict[Kind, str]:
    """What `directory` holds of `split`, and the sign by which that was seen."""
    shards, folder = shard_paths(directory, split), split_folder(directory, split)
    inside = bool(shards) and shards[0].parent == folder
    shard_sign = f"{shards[0].parent.name}/*.tar" if inside else f"{split}-*.tar"
    signs: dict[Kind, tuple[str, bool]] = {
        "shards": (shard_sign, bool(shards)),
        "folder": (f"{split}/", folder is not None and not inside),
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
        _check_found(directory)
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
    """Class folders without a folder for each split, or images with metadata."""
    if any(split_folder(directory, split) for split in ("train", "val")):
        return False
    if find_metadata(directory):
        return True
    folders = (name for name in class_directories(directory) if has_images(directory, name))
    # Two: any folder has folders, and a picture somewhere below one of them.
    found = list(itertools.islice(folders, 2))
    return len(found) > 1 and not any(map(_has_splits, (directory / name for name in found)))


def _has_splits(directory: Path) -> bool:
    """Returns True for a data set of its own, which is not a class."""
    return all(split_folder(directory, split) for split in ("train", "val"))


def _check_found(directory: Path) -> None:
    """DataError if `directory` is almost a data set: above one, of another format, or with class
    folders of one class or none."""
    if any(split_folder(directory, split) for split in ("train", "val")):
        return
    check_level(directory)
    check_format(directory)
    if unnamed := [path.name for path in all_shards(directory) if not path.name.endswith("gz")]:
        raise DataError(
            f"{directory}: the names of its tars do not name a split ({unnamed[0]})",
            "name shards train-0000.tar and val-0000.tar, or put them into folders train/ and val/",
        )
    classes = [name for name in class_directories(directory) if has_images(directory, name)]
    if len(classes) == 1 and is_unsplit(directory / classes[0]):
        raise level_error(directory, directory / classes[0])
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
    found = kinds_of(data_root(settings.dir), "val")
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


# As in train-0000.tar, imagenet1k-validation-00.tar and set_train_0.tar. Something follows the name of
# the split, so that train.tar, the archive of a folder train/, is not a shard.
_SPLIT_IN_NAME = re.compile(r"(?:^|[-_.])(train|training|val|validation|valid|test)[-_.]", re.I)


def shard_paths(directory: Path, split: Split) -> list[Path]:
    """Shards with the name of the split in theirs; else those in its folder. As of folders, those of
    `test` are for validation if there are no others."""
    named: dict[str, list[Path]] = {}
    for path in all_shards(directory):
        named.setdefault(_split_word(path), []).append(path)
    found_here = [path for name in _FOLDERS[split] for path in named.get(name, ())]
    if split == "val" and not found_here:
        found_here = named.get(_TEST, [])
    return sorted(found_here) or _shards_inside(split_folder(directory, split))


def _split_word(path: Path) -> str:
    """The name of the split in that of a shard; empty if there is none."""
    suffix = next(suffix for suffix in SHARD_SUFFIXES if path.name.endswith(suffix))
    found = _SPLIT_IN_NAME.search(path.name.removesuffix(suffix))
    return found[1].lower() if found else ""


def all_shards(directory: Path) -> list[Path]:
    """Tars in `directory` that can be shards, whatever their split."""
    try:
        with os.scandir(directory) as entries:
            names = [e.name for e in entries if e.name.endswith(SHARD_SUFFIXES)]
    except OSError:
        return []
    return sorted(directory / name for name in names if not name.startswith((".", "ILSVRC")))


def _shards_inside(folder: Path | None) -> list[Path]:
    """Tars in the folder of a split, unless each has the images of one class."""
    paths = [] if folder is None else all_shards(folder)
    plain = [path for path in paths if not path.name.endswith("gz")]
    if folder is None or not paths or class_directories(folder):
        return []
    for path in plain:
        try:
            return paths if is_shard(path, Retry(0)) else []
        except DataError:
            continue  # opening it reports what is wrong
    return [] if plain else paths


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
            "the shards of test are the validation set: there are none of val or validation"
        )
    return source


def _folder(directory: Path, split: Split, classes: Sequence[str] | None, retry: Retry) -> Source:
    """Class folders; else a tar for each class; else images with a label file."""
    root = split_folder(directory, split)
    if root is None and split == "train" and is_unsplit(directory):
        root = directory
    if root is None:
        if split == "train":
            _check_found(directory)
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
    if find_metadata(root):
        return MetadataFolder(root, classes, retry)
    folders, tars = class_directories(root), _tars(root)
    if folders == ["images"] and (root / ANNOTATIONS).is_file():
        return FlatFolder(root / "images", classes or read_classes(directory), retry)
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
    check_format(root)
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
    if find_metadata(root):
        return list(MetadataFolder(root, None).classes)
    folders = [name for name in class_directories(root) if has_images(root, name)]
    return folders or [path.stem for path in _tars(root)] or None


def _tars(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("*.tar") if not path.name.startswith("."))


KIND = SourceKind(open_layout, has_validation)
