"""`OpenedFiles`: what opening a data set found out about its files, for the other processes of a host.

Opening looks at every shard, or lists every folder, which on a shared file system costs more than all
else of it. So one process of a host opens the data set, writes what it found to a file in the host's
memory, and the others make their sources of that, without a look at the data set.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from paceline.core.errors import DataError
from paceline.data.settings import DataSettings
from paceline.data.sources.base import FileFacts, Source, Split
from paceline.data.sources.storage import Retry

_SHARED_MEMORY = Path("/dev/shm")
# Kinds of facts, and the class that is made of them.
_KINDS = {
    "shards": ("shards", "TarShards"),
    "files": ("folders", "ImageFiles"),
    "tars": ("archives", "TarredImages"),
}


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
        module, name = _KINDS[facts.kind]
        kind = getattr(importlib.import_module(f"paceline.data.sources.{module}"), name)
        source: Source = kind.from_facts(facts, Retry())
        return source

    def write(self) -> Path | None:
        """To a file that the processes of this host share and that the caller removes; None where there
        is nothing to share, or no place for it."""
        if not self._splits:
            return None
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
