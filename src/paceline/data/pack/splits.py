"""Opens the splits that a directory holds, for `pack` and `inspect`."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.errors import ConfigError
from paceline.data.settings import DataSettings
from paceline.data.sources.base import Source, Split
from paceline.data.sources.classes import read_classes
from paceline.data.sources.index_store import open_shards
from paceline.data.sources.layouts import all_shards, data_root, is_unsplit, kinds_of
from paceline.data.sources.registry import source_kind

SPLITS: tuple[Split, ...] = ("train", "val")


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
                return {"train": open_shards(unnamed, read_classes(root), keep_index=False)}
        may_be_unsplit = kind in ("auto", "folder") and split != "val" and root.is_dir()
        if may_be_unsplit and not any(there.values()) and is_unsplit(root):
            on_note(f"{root}: class folders without train/ and val/: taken as train")
            wanted = ("train",)
        if split == "all" and any(there.values()):
            wanted = tuple(s for s in SPLITS if there[s])
    found: dict[str, Source] = {}
    for name in wanted:
        known = found["train"].classes if "train" in found else None
        found[name] = source_kind(kind).open_split(settings, name, known, False)
    return found
