"""`OpenedFiles`: shares facts about the files of a data set among the processes of a host.

Opening checks every shard or lists every folder, which is slow on a shared file system. One process
of a host opens the data set and writes what it found to a file in memory. The others create their
sources from that.
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
# Kinds of facts: module and class of the source.
_KINDS = {
    "shards": ("shards", "TarShards"),
    "files": ("folders", "ImageFiles"),
    "tars": ("archives", "TarredImages"),
}


class OpenedFiles:
    """Facts about the splits of one data set. Storage of only a few files has none."""

    def __init__(self, settings: DataSettings) -> None:
        self._settings = settings
        self._splits: dict[str, FileFacts] = {}

    def add(self, split: Split, source: Source) -> None:
        """Adds the facts of `source`."""
        facts = source.file_facts()
        if facts is not None:
            self._splits[split] = facts

    def source(self, split: Split) -> Source | None:
        """Creates the source of a split from its facts. Returns None without facts."""
        facts = self._splits.get(split)
        if facts is None:
            return None
        module, name = _KINDS[facts.kind]
        kind = getattr(importlib.import_module(f"paceline.data.sources.{module}"), name)
        source: Source = kind.from_facts(facts, Retry())
        return source

    def write(self) -> Path | None:
        """Writes a file for the other processes of this host, which the caller removes.

        Returns:
            The file. None if there are no facts, or no memory left.
        """
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
            # Without memory, every process opens the data set itself.
            if path is not None:
                path.unlink(missing_ok=True)
            return None
        return path

    @classmethod
    def read(cls, path: Path, settings: DataSettings) -> OpenedFiles | None:
        """Reads the facts. Returns None if the file is missing or describes another data set."""
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
        opened = cls(settings)
        for split, (kind, about) in json.loads(metadata["splits"]).items():
            own = {n.partition("/")[2]: a for n, a in arrays.items() if n.startswith(f"{split}/")}
            opened._splits[split] = FileFacts(kind, own, about)
        return opened


def _new_file() -> Path:
    """Creates a file, if possible in memory, that only this user can read."""
    directory = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
    descriptor, name = tempfile.mkstemp(".opened", "paceline-", directory)
    os.close(descriptor)
    return Path(name)


def _text(settings: DataSettings) -> str:
    """Returns the settings as text, which identifies the data set. Paths may differ between nodes."""
    named: Mapping[str, Any] = {**asdict(settings), "dir": str(Path(settings.dir).absolute())}
    return json.dumps(named, default=str, sort_keys=True)
