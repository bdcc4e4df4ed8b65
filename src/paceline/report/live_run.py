"""`LiveRun`: a run folder that is read repeatedly while the run writes to it.

A refresh reads only what was appended since the last refresh. A file that was replaced or has become
shorter is read from its start. An incomplete last line is left for the next refresh.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import DataError, PacelineError
from paceline.core.files import open_regular
from paceline.report.records import RecordLog
from paceline.report.run_files import EVENTS_NAME, RunFiles, assemble, parse_line, rank_files

# A refresh reads at most this much of a file: the page of a huge run appears after several refreshes.
_MAX_BYTES = 64 << 20


@dataclass
class _Tail:
    """The records read so far from one metrics file, and the position in the file."""

    path: Path
    identity: tuple[int, int] = (0, 0)
    offset: int = 0
    lines: int = 0
    log: RecordLog = field(default_factory=RecordLog)

    def read_on(self) -> bool:
        """Reads the appended lines; returns True if the records have changed."""
        with open_regular(self.path) as file:
            status = os.fstat(file.fileno())
            identity, restarted = (status.st_dev, status.st_ino), False
            if identity != self.identity or status.st_size < self.offset:
                restarted = self.lines > 0
                self.identity, self.offset, self.lines, self.log = identity, 0, 0, RecordLog()
            if status.st_size == self.offset:
                return restarted
            file.seek(self.offset)
            content = file.read(_MAX_BYTES)
        whole = content.rfind(b"\n") + 1
        for line in content[:whole].split(b"\n")[:-1]:
            self.lines += 1
            self.log.append(parse_line(line, self.path, self.lines))
            self.offset += len(line) + 1
        return restarted or whole > 0


class LiveRun:
    """A run folder that is read repeatedly.

    Attributes:
        path: The run folder.
        files: The contents of the folder, or None if the folder cannot be read.
        problem: The reason why the folder cannot be read; empty if it can be read.
        version: A number that changes whenever `files` or `problem` changes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: RunFiles | None = None
        self.problem = "not read yet"
        self.version = 0
        self._tails: dict[int, _Tail] = {}
        self._file_states: tuple[object, ...] = ()

    def refresh(self) -> None:
        """Reads what is new in the folder. Errors in the folder set `problem` and raise nothing."""
        try:
            changed = self._read_on()
            problem = ""
        except PacelineError as error:
            changed, problem = False, str(error)
        except OSError as error:
            changed = False
            problem = f"{self.path} cannot be read: {error.strerror}; trying again"
        if problem:
            self._tails.clear()
            self.files = None
        if changed or problem != self.problem:
            self.version += 1
        self.problem = problem

    def _read_on(self) -> bool:
        if not (self.path / EVENTS_NAME).is_file():
            problem = f"has no {EVENTS_NAME} yet" if self.path.is_dir() else "does not exist"
            raise DataError(f"run folder {self.path} {problem}", "trying again")
        files = rank_files(self.path)
        changed = files.keys() != self._tails.keys()
        self._tails = {rank: self._tails.get(rank) or _Tail(file) for rank, file in files.items()}
        for tail in self._tails.values():
            changed |= tail.read_on()
        states = tuple(
            _state(self.path / name) for name in ("summary.json", "config.toml", "evaluation.json")
        )
        if changed or states != self._file_states or self.files is None:
            ranks = {rank: tail.log.current() for rank, tail in self._tails.items()}
            self.files, self._file_states, changed = assemble(self.path, ranks), states, True
        return changed


def _state(path: Path) -> tuple[int, int, int] | None:
    """Returns inode, size and modification time of a file, to detect changes.

    Returns None if the file does not exist.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def run_folders(given: Iterable[Path]) -> list[Path]:
    """Replaces each folder that contains run folders by these run folders.

    Run folders and folders without run folders are returned as they are. A folder need not exist yet,
    because it can become a run folder or receive its first run later.
    """
    folders: dict[Path, Path] = {}
    for path in given:
        try:
            runs = sorted(file.parent for file in path.glob(f"*/{EVENTS_NAME}"))
            is_run = (path / EVENTS_NAME).exists()
        except OSError:  # reported when the run is read
            runs, is_run = [], True
        for run in runs if runs and not is_run else [path]:
            folders.setdefault(run.resolve(), run)
    return list(folders.values())
