"""Which splits a directory holds, for `paceline pack` and `paceline inspect`.

In: a directory, and the kind of source where the user names it. Out: the sources of all its splits, or of
the one asked for. Shards whose names tell no split are taken as training data, and that is said. Nothing
is written beside the data.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.data.settings import DataSettings
from paceline.data.sources.class_list import read_classes
from paceline.data.sources.source import Source, Split, kinds_of, open_source
from paceline.data.sources.tar_shards import SHARD_SUFFIXES, TarShards

SPLITS: tuple[Split, ...] = ("train", "val")


def open_splits(
    directory: str,
    kind: str = "auto",
    split: str = "all",
    tell: Callable[[str], None] = lambda note: None,
) -> dict[str, Source]:
    """By split, training first. DataError where there is nothing, or not what was asked for."""
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
                tell(f"{unnamed[0].name} … tell no split by their names: taken as train")
                return {"train": TarShards(unnamed, read_classes(root), keep_index=False)}
        if split == "all" and any(there.values()):
            wanted = tuple(s for s in SPLITS if there[s])
    found: dict[str, Source] = {}
    for name in wanted:
        known = found["train"].classes if "train" in found else None
        found[name] = open_source(settings, name, known, keep_index=False)
    return found


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
