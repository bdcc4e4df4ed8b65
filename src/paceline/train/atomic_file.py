"""Whole files of a run: checkpoints, records, weights.

In: a path and its content. Out: the file in its place, on disk; or the old one untouched and an error
that says why.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

from paceline.core.errors import CheckpointError
from paceline.core.whole_file import part_path, sync_directory, whole_file


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Temporary file, fsync, rename, fsync of the folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(content)
    except OSError as error:
        raise CheckpointError(*_explain(path, len(content), error)) from error


def link_atomically(source: Path, path: Path) -> None:
    """A second name for `source`; a copy where the file system has no hard links."""
    temporary = part_path(path)
    try:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CheckpointError(*_explain(path, source.stat().st_size, error)) from error


def _explain(path: Path, length: int, error: OSError) -> tuple[str, str]:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"no space left to write {path} ({length / 1e6:.1f} MB)",
            "free space or choose another --output, then --resume auto",
        )
    return (f"cannot write {path}: {error.strerror or error}", "check --output")
