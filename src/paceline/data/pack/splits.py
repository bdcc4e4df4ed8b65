"""Opens the splits of a data set: for training behind checks and a cache, for `pack` and `inspect`
as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.data.pack.manifest import check_packed
from paceline.data.settings import DataSettings
from paceline.data.sources.base import Source, Split
from paceline.data.sources.cache import cached
from paceline.data.sources.labels import read_classes
from paceline.data.sources.layouts import kinds_of, open_layout, shard_paths
from paceline.data.sources.shards import SHARD_SUFFIXES, TarShards

SPLITS: tuple[Split, ...] = ("train", "val")


def open_source(
    settings: DataSettings, split: Split, classes: Sequence[str] | None = None
) -> Source:
    """Opens one split, behind the cache that the settings ask for. `classes`, those of the training
    split, define what the labels mean where the data does not say it. DataError where anything is
    missing or not whole."""
    _check_pack(settings, split)
    return cached(open_layout(settings, split, classes), settings, split)


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
        root = Path(directory).expanduser()
        there = {s: kinds_of(root, s) for s in SPLITS}
        if not any(there.values()) and kind in ("auto", "shards") and split != "val":
            unnamed = all_shards(directory)
            if unnamed:
                on_note(f"{unnamed[0].name} … tell no split by their names: taken as train")
                return {"train": TarShards(unnamed, read_classes(root), keep_index=False)}
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
    directory = Path(settings.dir).expanduser()
    if not settings.dir or settings.source not in ("auto", "shards") or not directory.is_dir():
        return
    if settings.source == "shards" or shard_paths(directory, split):
        check_packed(directory, split)


def all_shards(directory: str) -> list[Path]:
    """Every shard in `directory`, whatever its split."""
    root = Path(directory).expanduser()
    if not directory or not root.is_dir():
        return []
    return sorted(
        path
        for path in root.iterdir()
        if path.name.endswith(SHARD_SUFFIXES) and not path.name.startswith((".", "ILSVRC"))
    )
