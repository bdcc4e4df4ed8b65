"""Opens the splits in a directory, for `pack` and `inspect`."""

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
    """Opens the splits in a directory, training first. Writes nothing.

    Args:
        directory: The directory. Empty for embedded or synthetic images.
        kind: Kind of data, with the values of `data.source`.
        split: "train", "val", or "all" for every split that exists.
        on_note: Called with a note if data without splits is used as training data.

    Raises:
        DataError: If the directory has no data.
        ConfigError: If `split` has none of these values.
    """
    settings = DataSettings(dir=directory, source=kind)
    wanted = SPLITS if split == "all" else tuple(s for s in SPLITS if s == split)
    if not wanted:
        raise ConfigError("--split", split, "unknown", "known: all, train, val")
    if directory:
        root = data_root(directory)
        present = tuple(s for s in SPLITS if kinds_of(root, s))
        if split == "all" and present:
            wanted = present
        elif split != "val" and not present:
            unnamed = all_shards(root) if kind in ("auto", "shards") else []
            if unnamed:
                on_note(f"{unnamed[0].name} … have no split in their names: used as train")
                return {"train": open_shards(unnamed, read_classes(root), keep_index=False)}
            if kind in ("auto", "folder") and root.is_dir() and is_unsplit(root):
                on_note(f"{root}: class folders without train/ and val/: used as train")
                wanted = ("train",)
    sources: dict[str, Source] = {}
    for name in wanted:
        classes = sources["train"].classes if "train" in sources else None
        sources[name] = source_kind(kind).open_split(settings, name, classes, False)
    return sources
