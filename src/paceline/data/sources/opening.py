"""Opens the splits of the data that the settings name, behind the cache that they ask for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.core.errors import ConfigError, DataError
from paceline.core.extensions import load_part
from paceline.data.image import CorruptImage, image_facts
from paceline.data.order import Int64
from paceline.data.settings import DataSettings
from paceline.data.sources.base import (
    Source,
    Split,
    checked_source,
    split_source,
    validation_indices,
)
from paceline.data.sources.opened_files import OpenedFiles
from paceline.data.sources.registry import source_kind

_LOOKS = 8


def open_source(
    settings: DataSettings, split: Split, classes: Sequence[str] | None = None,
    opened: OpenedFiles | None = None,
) -> Source:  # fmt: skip
    """Opens one split, behind the cache that the settings ask for. `classes`, those of the training
    split, define what the labels mean where the data does not say it. DataError where anything is
    missing or not whole. What `opened` knows about the files is used, and added to where it is new."""
    if not settings.val_split:
        return _cached(_opened(settings, split, classes, opened), settings, split)
    whole = _opened(settings, "train", classes, opened)
    if sign := source_kind(settings.source).validation(settings):
        raise _not_split(settings, f"there is a validation set ({sign})")
    return _cached(split_source(whole, settings.val_split, split), settings, split)


def _opened(
    settings: DataSettings, split: Split, classes: Sequence[str] | None, opened: OpenedFiles | None
) -> Source:
    found = opened.source(split) if opened is not None else None
    if found is None:
        found = source_kind(settings.source).open_split(settings, split, classes, True)
        if opened is not None:
            if settings.cache == "disk":
                found.identity()  # the cache asks for it; here the other processes get it as well
            opened.add(split, found)
    return found


def _cached(source: Source, settings: DataSettings, split: Split) -> Source:
    """`source` behind the cache that the settings ask for; each split has its own."""
    if settings.cache == "none":
        return source
    cached = load_part("data.sources.cache:cached", "data.cache", settings.cache)
    found: Source = cached(source, settings, split)
    return found


def open_other(
    settings: DataSettings, classes: Sequence[str], is_training_data: Callable[[Int64], bool]
) -> tuple[Source, str]:
    """Opens the images to evaluate on in a directory that is not that of the run: its validation set, or
    else all of its images. The line says which.

    `data.val_split` holds for the training data only, also if that is at another place now:
    `is_training_data` recognizes it by the labels that were trained on.
    """
    unsplit = replace(settings, val_split=0.0)
    if source_kind(unsplit.source).validation(unsplit):
        return open_source(unsplit, "val", classes), ""
    whole, share = _opened(unsplit, "train", classes, None), settings.val_split
    trained = whole.labels
    if share:
        trained = np.delete(trained, validation_indices(trained, share))
    if not is_training_data(trained):
        note = f"{settings.dir} has no validation set: all of its {len(whole)} images are evaluated"
        return _cached(whole, unsplit, "train"), note
    if not share:
        return open_source(unsplit, "val", classes), ""  # names the remedy
    note = f"{settings.dir} is the training data: data.val_split = {share:g} of it is evaluated"
    return _cached(split_source(whole, share, "val"), settings, "val"), note


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
    return _cached(train, settings, "train"), _cached(val, settings, "val")


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
    source = source.uncached  # the cache's counters are those of the training
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
