"""Names what a directory is if no data set in it can be read: one of another format, or a folder above
the data set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from paceline.core.errors import DataError

# Names of files, and the format that they belong to.
_FORMATS = tuple(
    (re.compile(pattern, re.I), name)
    for pattern, name in (
        (r".*\.parquet$", "parquet"),
        (r".*\.arrow$", "Arrow (Hugging Face's save_to_disk)"),
        (r".*\.tfrecords?(\.gz)?$|.*\.tfrecord-.*|(train|validation)-\d{5}-of-\d{5}$", "TFRecord"),
        (r".*\.mds(\.\w+)?$", "MDS (MosaicML Streaming)"),
        (r".*\.beton$", "FFCV"),
        (r"data\.mdb$|.*\.lmdb$", "LMDB"),
        (r".*\.rec$", "RecordIO (MXNet)"),
        (r".*\.(h5|hdf5)$", "HDF5"),
        (r".*\.npz$", "NumPy's npz"),
    )
)
_REMEDY = (
    "pass a Dataset of (image, label) that reads it to pl.Trainer(data=…), or convert it to class "
    "folders or tar shards (docs/data.md)"
)
_TRAIN = re.compile(r"train(ing)?$", re.I)
_SHARD = re.compile(r"(.*[-_.])?train(ing)?[-_.].*\.(tar|tgz|tar\.gz)$", re.I)
_DEEPEST = 3
_FOLDERS_LOOKED_AT = 200


def check_format(directory: Path) -> None:
    """Raises DataError if files of a format that is not read lie in `directory` or a folder of it."""
    for folder in (directory, *_folders(directory)):
        for entry in _names(folder):
            for pattern, name in _FORMATS:
                if pattern.match(entry):
                    raise DataError(f"{folder / entry}: {name} is not read", _REMEDY)


def check_level(directory: Path) -> None:
    """Raises DataError if a folder below `directory` holds the data set."""
    level, looked_at = [directory], 0
    for _ in range(_DEEPEST):
        level = [folder for above in level for folder in _folders(above)]
        looked_at += len(level)
        if looked_at > _FOLDERS_LOOKED_AT:
            return
        if found := [folder for folder in level if _is_data_set(folder)]:
            raise level_error(directory, found[0])


def level_error(directory: Path, found: Path) -> DataError:
    return DataError(
        f"{directory}: the data set is in a folder below it", f"use --data-dir {found}"
    )


def _is_data_set(directory: Path) -> bool:
    """Returns True if `directory` has a folder or shards for training, by their names."""
    folders = {folder.name for folder in _folders(directory)}
    return any(map(_TRAIN.match, folders)) or any(
        map(_SHARD.match, set(_names(directory)) - folders)
    )


def _folders(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            return sorted(
                Path(entry.path) for entry in entries
                if entry.is_dir() and not entry.name.startswith(".")
            )  # fmt: skip
    except OSError:
        return []


def _names(directory: Path) -> Iterator[str]:
    try:
        with os.scandir(directory) as entries:
            yield from sorted(entry.name for entry in entries)
    except OSError:
        return
