"""Opens the splits of a data set: for training behind checks and a cache, for `pack` and `inspect`
as they are; `OpenedFiles`: what that found out about the files, for the other processes of a host.

Opening looks at every shard, or lists every folder, which on a shared file system costs more than all
else of it. So one process of a host opens the data set, writes what it found to a file in the host's
memory, and the others make their sources of that, without a look at the data set.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.errors import ConfigError, DataError
from paceline.data.image import CorruptImage, image_facts
from paceline.data.order import Int64
from paceline.data.pack.manifest import check_packed
from paceline.data.settings import DataSettings
from paceline.data.sources.base import (
    FileFacts,
    Source,
    Split,
    checked_source,
    split_source,
    validation_indices,
)
from paceline.data.sources.cache import CachedSource, cached
from paceline.data.sources.folders import ImageFiles
from paceline.data.sources.labels import read_classes
from paceline.data.sources.layouts import (
    all_shards,
    data_root,
    has_validation,
    is_unsplit,
    kinds_of,
    open_layout,
    shard_paths,
)
from paceline.data.sources.shards import TarredImages, TarShards
from paceline.data.sources.storage import Retry

SPLITS: tuple[Split, ...] = ("train", "val")
_LOOKS = 8


def open_source(
    settings: DataSettings, split: Split, classes: Sequence[str] | None = None,
    opened: OpenedFiles | None = None,
) -> Source:  # fmt: skip
    """Opens one split, behind the cache that the settings ask for. `classes`, those of the training
    split, define what the labels mean where the data does not say it. DataError where anything is
    missing or not whole. What `opened` knows about the files is used, and added to where it is new."""
    if not settings.val_split:
        return cached(_checked_layout(settings, split, classes, opened), settings, split)
    whole = _checked_layout(settings, "train", classes, opened)
    if sign := has_validation(settings):
        raise _not_split(settings, f"there is a validation set ({sign})")
    return cached(split_source(whole, settings.val_split, split), settings, split)


def open_other(
    settings: DataSettings, classes: Sequence[str], is_training_data: Callable[[Int64], bool]
) -> tuple[Source, str]:
    """Opens the images to evaluate on in a directory that is not that of the run: its validation set, or
    else all of its images. The line says which.

    `data.val_split` holds for the training data only, also if that is at another place now:
    `is_training_data` recognizes it by the labels that were trained on.
    """
    unsplit = replace(settings, val_split=0.0)
    if has_validation(unsplit):
        return open_source(unsplit, "val", classes), ""
    whole, share = _checked_layout(unsplit, "train", classes, None), settings.val_split
    trained = whole.labels
    if share:
        trained = np.delete(trained, validation_indices(trained, share))
    if not is_training_data(trained):
        note = f"{settings.dir} has no validation set: all of its {len(whole)} images are evaluated"
        return cached(whole, unsplit, "train"), note
    if not share:
        return open_source(unsplit, "val", classes), ""  # names the remedy
    note = f"{settings.dir} is the training data: data.val_split = {share:g} of it is evaluated"
    return cached(split_source(whole, share, "val"), settings, "val"), note


def _checked_layout(
    settings: DataSettings, split: Split, classes: Sequence[str] | None, opened: OpenedFiles | None
) -> Source:
    found = opened.source(split) if opened is not None else None
    if found is None:
        _check_pack(settings, split)
        found = open_layout(settings, split, classes)
        if opened is not None:
            if settings.cache == "disk":
                found.identity()  # the cache asks for it; here the other processes get it as well
            opened.add(split, found)
    return found


def open_data(
    settings: DataSettings, train: Source | None = None, val: Source | None = None,
    opened: OpenedFiles | None = None,
) -> tuple[Source, Source]:  # fmt: skip
    """Both splits: the sources given, or those that the settings name. A part of a training source
    serves as the other where `data.val_split` asks for it. `opened` as in `open_source`."""
    if train is None and val is None:
        source = open_source(settings, "train", opened=opened)
        return source, open_source(settings, "val", source.classes, opened)
    if settings.cache == "disk":
        raise ConfigError(
            "data.cache", "disk", "cannot tell the images of a Python source from earlier ones",
            "use 'memory' or 'none'",
        )  # fmt: skip
    train = (
        open_source(settings, "train", opened=opened) if train is None else checked_source(train)
    )
    val = None if val is None else checked_source(val)
    if val is not None and settings.val_split:
        raise _not_split(settings, "there is a validation set (val_data)")
    if val is None and settings.val_split:
        whole, share = train, settings.val_split
        train = split_source(whole, share, "train")
        val = split_source(whole, share, "val", owner=False)
    elif val is None and settings.dir:
        val = open_source(settings, "val", train.classes, opened)
    if val is None:
        raise DataError(
            f"{train.kind} is the training data, and there is no validation data",
            "give val_data, or set data.val_split = 0.1",
        )
    return cached(train, settings, "train"), cached(val, settings, "val")


def _not_split(settings: DataSettings, problem: str) -> ConfigError:
    return ConfigError(
        "data.val_split", settings.val_split, problem,
        "leave --val-split out, or set data.val_split = 0, to validate on it",
    )  # fmt: skip


def as_source(
    data: Any, split: Split = "train", classes: Sequence[str] | None = None,
    settings: DataSettings | None = None,
) -> Source:  # fmt: skip
    """`data` as a source: one that is, a directory that `--data-dir` takes (opened with `settings`), or
    a map-style Dataset of (image, label), whose classes are `classes` where it does not name them."""
    if isinstance(data, Source):
        return checked_source(data)
    if isinstance(data, str | os.PathLike):
        chosen = settings or DataSettings()
        kind = "auto" if chosen.source in ("embedded", "synthetic") else chosen.source
        return open_source(replace(chosen, dir=os.fspath(data), source=kind), split, classes)
    from paceline.data.sources.dataset import (
        DatasetSource,
    )  # imports torch, which directories do not need

    return DatasetSource(data, classes)


def describe_channels(source: Source, channels: int) -> str:
    """A note where the images have other channels than `data.channels`, by a look at a few of them."""
    if isinstance(source, CachedSource):
        source = source.whole  # whose counters are those of the training
    count, seen = len(source), set()
    for index in range(0, count, max(1, count // _LOOKS)):
        try:
            seen.add(image_facts(source.read(index)).channels)
        except (CorruptImage, DataError):
            continue  # which the training reports
    if channels == 1 and 3 in seen:
        return "images in color become grayscale (data.channels = 1); --set data.channels=3 keeps colors"
    if channels == 3 and seen == {1}:
        return "grayscale images fill three equal channels; --set data.channels=1 trains on one"
    return ""


def open_splits(
    directory: str,
    kind: str = "auto",
    split: str = "all",
    on_note: Callable[[str], None] = lambda note: None,
) -> dict[str, Source]:
    """The splits that a directory holds, or the one asked for, by name, training first. DataError
    where there is nothing, or not what was asked for. Shards whose names give no split are taken as
    training data, and `on_note` is called. Nothing is written beside the data."""
    settings = DataSettings(dir=directory, source=kind)
    wanted = SPLITS if split == "all" else tuple(s for s in SPLITS if s == split)
    if not wanted:
        raise ConfigError("--split", split, "unknown", "known: all, train, val")
    if directory:
        root = data_root(directory)
        there = {s: kinds_of(root, s) for s in SPLITS}
        if not any(there.values()) and kind in ("auto", "shards") and split != "val":
            unnamed = all_shards(root)
            if unnamed:
                on_note(f"{unnamed[0].name} … tell no split by their names: taken as train")
                return {"train": TarShards(unnamed, read_classes(root), keep_index=False)}
        may_be_unsplit = kind in ("auto", "folder") and split != "val" and root.is_dir()
        if may_be_unsplit and not any(there.values()) and is_unsplit(root):
            on_note(f"{root}: class folders without train/ and val/: taken as train")
            wanted = ("train",)
        if split == "all" and any(there.values()):
            wanted = tuple(s for s in SPLITS if there[s])
    found: dict[str, Source] = {}
    for name in wanted:
        known = found["train"].classes if "train" in found else None
        _check_pack(settings, name)
        found[name] = open_layout(settings, name, known, keep_index=False)
    return found


def _check_pack(settings: DataSettings, split: Split) -> None:
    """DataError where the shards of a split are an unfinished or incomplete pack."""
    directory = data_root(settings.dir)
    if not settings.dir or settings.source not in ("auto", "shards") or not directory.is_dir():
        return
    if settings.source == "shards" or shard_paths(directory, split):
        check_packed(directory, split)


_SHARED_MEMORY = Path("/dev/shm")
_KINDS: dict[str, type[TarShards | ImageFiles | TarredImages]] = {
    "shards": TarShards, "files": ImageFiles, "tars": TarredImages,
}  # fmt: skip


class OpenedFiles:
    """Of the splits of one data set. Kinds of storage of a few files have no facts to share, and every
    process opens them."""

    def __init__(self, settings: DataSettings) -> None:
        self._settings = settings
        self._splits: dict[str, FileFacts] = {}

    def add(self, split: Split, source: Source) -> None:
        """Remembers what `source` knows about its files."""
        facts = source.file_facts()
        if facts is not None:
            self._splits[split] = facts

    def source(self, split: Split) -> Source | None:
        """Made without a look at the files; None for a split of which nothing is known."""
        facts = self._splits.get(split)
        if facts is None:
            return None
        return _KINDS[facts.kind].from_facts(facts, Retry())

    def write(self) -> Path | None:
        """To a file that the processes of this host share and that the caller removes; None where there
        is nothing to share, or no place for it."""
        if not self._splits:
            return None
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        arrays = {
            f"{split}/{name}": np.ascontiguousarray(array)
            for split, facts in self._splits.items()
            for name, array in facts.arrays.items()
        }
        about = {split: [facts.kind, facts.about] for split, facts in self._splits.items()}
        metadata = {"settings": _text(self._settings), "splits": json.dumps(about)}
        path: Path | None = None
        try:
            path = _new_file()
            save_file(arrays, path, metadata=metadata)
        except (OSError, SafetensorError):
            # No memory left: every process opens the data set by itself.
            if path is not None:
                path.unlink(missing_ok=True)
            return None
        return path

    @classmethod
    def read(cls, path: Path, settings: DataSettings) -> OpenedFiles | None:
        """None where this process does not see the file, or has another data set than its writer."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("settings") != _text(settings):
                    return None
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except OSError:
            return None
        except SafetensorError as error:
            raise DataError(f"{path}: damaged ({error})", "free memory in /dev/shm") from None
        found = cls(settings)
        for split, (kind, about) in json.loads(metadata["splits"]).items():
            own = {n.partition("/")[2]: a for n, a in arrays.items() if n.startswith(f"{split}/")}
            found._splits[split] = FileFacts(kind, own, about)
        return found


def _new_file() -> Path:
    """In memory, where the host has such a file system, readable by this user alone."""
    for directory in (_SHARED_MEMORY, None):
        if directory is None or os.access(directory, os.W_OK):
            descriptor, name = tempfile.mkstemp(".opened", "paceline-", directory)
            os.close(descriptor)
            return Path(name)
    raise AssertionError("the last directory is always tried")


def _text(settings: DataSettings) -> str:
    """By which a process recognizes its own data set: nodes may have paths of their own."""
    named: Mapping[str, Any] = {**asdict(settings), "dir": str(Path(settings.dir).absolute())}
    return json.dumps(named, default=str, sort_keys=True)
