"""Opens the splits of a data set according to the settings, including the cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.core.errors import ConfigError, DataError
from paceline.core.extensions import load_part
from paceline.data.order import Int64
from paceline.data.settings import DataSettings
from paceline.data.sources.base import (
    Source,
    Split,
    checked_source,
    split_source,
    validation_indices,
)
from paceline.data.sources.registry import source_kind


def open_source(
    settings: DataSettings, split: Split, classes: Sequence[str] | None = None,
) -> Source:  # fmt: skip
    """Opens one split, with the cache that the settings choose.

    Args:
        settings: Settings of the data set and the cache.
        split: The split to open.
        classes: Class names of the training split, for data without class names.

    Raises:
        DataError: If data is missing or damaged.
        ConfigError: If `data.val_split` is set although the data has a validation set.
    """
    if not settings.val_split:
        return _cached(_opened(settings, split, classes), settings, split)
    whole = _opened(settings, "train", classes)
    if evidence := source_kind(settings.source).validation(settings):
        raise _not_split(settings, f"there is a validation set ({evidence})")
    return _cached(split_source(whole, settings.val_split, split), settings, split)


def _opened(settings: DataSettings, split: Split, classes: Sequence[str] | None) -> Source:
    return source_kind(settings.source).open_split(settings, split, classes, True)


def _cached(source: Source, settings: DataSettings, split: Split) -> Source:
    if settings.cache == "none":
        return source
    cached = load_part("data.sources.cache:cached", "data.cache", settings.cache)
    with_cache: Source = cached(source, settings, split)
    return with_cache


def open_other(
    settings: DataSettings, classes: Sequence[str], is_training_data: Callable[[Int64], bool]
) -> tuple[Source, str]:
    """Opens images for evaluation in a directory other than the run's directory.

    The result is the validation set of the directory, or all its images if there is no validation
    set. `data.val_split` applies only if these images are the training data of the run, for example
    in a moved directory.

    Args:
        settings: The run's settings with the other directory.
        classes: Class names of the run.
        is_training_data: Returns True if the labels are the labels of the run's training data.

    Returns:
        The images, and a note that tells which images were chosen.
    """
    unsplit = replace(settings, val_split=0.0)
    if source_kind(unsplit.source).validation(unsplit):
        return open_source(unsplit, "val", classes), ""
    whole, share = _opened(unsplit, "train", classes), settings.val_split
    trained = whole.labels
    if share:
        trained = np.delete(trained, validation_indices(trained, share))
    if not is_training_data(trained):
        note = f"{settings.dir} has no validation set: all of its {len(whole)} images are evaluated"
        return _cached(whole, unsplit, "train"), note
    if not share:
        return open_source(unsplit, "val", classes), ""  # raises an error with the remedy
    note = f"{settings.dir} is the training data: data.val_split = {share:g} of it is evaluated"
    return _cached(split_source(whole, share, "val"), settings, "val"), note


def open_data(
    settings: DataSettings, train: Source | None = None, val: Source | None = None,
) -> tuple[Source, Source]:  # fmt: skip
    """Opens the training and the validation split.

    Args:
        settings: Settings of the data set and the cache.
        train: The training data. None opens the training data that the settings name.
        val: The validation data. None uses a part of `train`, or the data that the settings name.

    Raises:
        DataError: If data is missing or damaged.
        ConfigError: If the settings do not fit the sources.
    """
    if train is None and val is None:
        source = open_source(settings, "train")
        return source, open_source(settings, "val", source.classes)
    if settings.cache == "disk":
        raise ConfigError(
            "data.cache", "disk", "cannot identify the images of a Python object",
            "use 'memory' or 'none'",
        )  # fmt: skip
    train = open_source(settings, "train") if train is None else checked_source(train)
    val = None if val is None else checked_source(val)
    if val is not None and settings.val_split:
        raise _not_split(settings, "there is a validation set (val_data)")
    if val is None and settings.val_split:
        whole, share = train, settings.val_split
        train = split_source(whole, share, "train")
        val = split_source(whole, share, "val", owner=False)
    elif val is None and settings.dir:
        val = open_source(settings, "val", train.classes)
    if val is None:
        raise DataError(
            f"{train.kind} is the training data, and there is no validation data",
            "give val_data, or set data.val_split = 0.1",
        )
    return _cached(train, settings, "train"), _cached(val, settings, "val")


def open_unsplit(
    settings: DataSettings, train: Source | None = None, val: Source | None = None
) -> tuple[Source, str]:
    """Opens the training images before a part of them is held out for validation.

    Args:
        settings: Settings of the data set.
        train: The training data. None opens the training data that the settings name.
        val: The validation data, if a program has given it.

    Returns:
        The images, and the evidence of a validation set, or "" if there is none.
    """
    if val is not None:
        evidence = "val_data"
    elif train is not None and not settings.dir:
        evidence = ""
    else:
        evidence = source_kind(settings.source).validation(settings)
    source = _opened(settings, "train", None) if train is None else checked_source(train)
    return source, evidence


def _not_split(settings: DataSettings, problem: str) -> ConfigError:
    return ConfigError(
        "data.val_split", settings.val_split, problem,
        "leave --val-split out, or set data.val_split = 0, to validate on it",
    )  # fmt: skip


def as_source(
    data: Any, split: Split = "train", classes: Sequence[str] | None = None,
    settings: DataSettings | None = None,
) -> Source:  # fmt: skip
    """Converts `data` to a source.

    Args:
        data: A source, a directory as for `--data-dir`, or a map-style Dataset of (image, label).
        split: The split to open in a directory.
        classes: Names of the classes, for a Dataset without names.
        settings: Settings for opening a directory.

    Raises:
        DataError: If data is missing or damaged.
    """
    if isinstance(data, Source):
        return checked_source(data)
    if isinstance(data, str | os.PathLike):
        chosen = settings or DataSettings()
        kind = "auto" if chosen.source in ("embedded", "synthetic") else chosen.source
        return open_source(replace(chosen, dir=os.fspath(data), source=kind), split, classes)
    from paceline.data.sources.dataset import DatasetSource  # imports torch

    return DatasetSource(data, classes)
