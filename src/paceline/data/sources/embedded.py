"""The images in the package, in compressed shards: `data.source = embedded`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.data.settings import DataSettings
from paceline.data.sources.base import Source, Split
from paceline.data.sources.classes import read_classes
from paceline.data.sources.registry import SourceKind
from paceline.data.sources.shards import TarShards, shards_in_memory

EMBEDDED = Path(__file__).parent.parent / "embedded"


def open_split(
    settings: DataSettings, split: Split, classes: Sequence[str] | None, keep_index: bool
) -> Source:
    paths = sorted(EMBEDDED.glob(f"{split}-*.tar.gz"))
    return TarShards(shards_in_memory(paths), read_classes(EMBEDDED))


KIND = SourceKind(open_split)
