"""Files that are there whole or not at all.

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


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Temporary file, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CheckpointError(*_explain(path, len(content), error)) from error


def link_atomically(source: Path, path: Path) -> None:
    """A second name for `source`; a copy where the file system has no hard links."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CheckpointError(*_explain(path, source.stat().st_size, error)) from error


def sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explain(path: Path, length: int, error: OSError) -> tuple[str, str]:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"no space left to write {path} ({length / 1e6:.1f} MB)",
            "free space or choose another --output, then --resume auto; "
            "the last good checkpoint is untouched",
        )
    return (f"cannot write {path}: {error.strerror or error}", "check --output")
