"""Whether the shards of a directory are whole, and those that their manifest tells of.

In: a directory with shards. Out: a sentence for each thing that is wrong: the structure of a tar, a
label, an index that says otherwise than its shard, a checksum. Nothing is changed or taken on trust.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from paceline.core.errors import DataError
from paceline.data.packing.pack_manifest import PackedShard, PackManifest
from paceline.data.packing.pack_shard import file_digest
from paceline.data.sources.shard_file import unreadable
from paceline.data.sources.shard_index_file import UnfitIndexError, index_path, read_index
from paceline.data.sources.shard_stamp import ShardStamp
from paceline.data.sources.tar_index import ShardIndex, scan_shard

# What is being done, how much of it is done, and how much there is to do.
OnProgress = Callable[[str, int, int], None]


def shard_problems(
    directory: Path, paths: Sequence[Path], checksums: bool, on_progress: OnProgress
) -> Iterator[str]:
    """`paths` are the shards of all splits; with `checksums` off their bytes are not read."""
    counts: dict[str, int] = {}
    for done, path in enumerate(paths, start=1):
        on_progress("structure of shards", done, len(paths))
        if path.name.endswith("gz"):
            continue  # opening it has read all of it, under gzip's own checksum
        try:
            index = _scanned(path)
        except DataError as error:
            yield str(error)
            continue
        counts[path.name] = len(index)
        yield from _index_problems(path, index)
    try:
        manifest = PackManifest.read(directory)
    except DataError as error:
        yield str(error)
        return
    if manifest is not None:
        yield from _manifest_problems(directory, manifest, {p.name for p in paths}, counts)
        if checksums:
            yield from _checksum_problems(directory, manifest, on_progress)


def _scanned(path: Path) -> ShardIndex:
    try:
        with path.open("rb") as content:
            return scan_shard(path, content)
    except OSError as error:
        raise unreadable(path, error) from None


def _index_problems(path: Path, index: ShardIndex) -> Iterator[str]:
    """One that is stale is no problem: it is never used, and built anew by whoever trains."""
    try:
        kept = read_index(index_path(path), ShardStamp.of(path))
    except (UnfitIndexError, OSError):
        return
    if kept is None:
        return
    same = all(
        np.array_equal(getattr(kept, name), getattr(index, name))
        for name in ("offsets", "sizes", "labels")
    )
    if not same or kept.names.parts[1] != index.names.parts[1]:
        yield f"{index_path(path)}: says otherwise than its shard; remove it"


def _manifest_problems(
    directory: Path, manifest: PackManifest, there: set[str], counts: dict[str, int]
) -> Iterator[str]:
    told: set[str] = set()
    for split, record in manifest.splits.items():
        if not record.complete:
            yield (
                f"{directory}: {split} is packed up to {record.stop} of {record.samples} samples; "
                "repeat the pack command"
            )
        for shard in record.shards:
            told.add(shard.name)
            if shard.name not in there:
                yield f"{directory / shard.name}: is missing, the manifest has it"
            elif counts.get(shard.name, shard.samples) != shard.samples:
                yield (
                    f"{directory / shard.name}: {counts[shard.name]} samples, the manifest says "
                    f"{shard.samples}"
                )
    for name in sorted(there - told):
        yield f"{directory / name}: is not in the manifest"


def _checksum_problems(
    directory: Path, manifest: PackManifest, on_progress: OnProgress
) -> Iterator[str]:
    shards = [shard for record in manifest.splits.values() for shard in record.shards]
    for done, shard in enumerate(shards, start=1):
        on_progress("checksums of shards", done, len(shards))
        path = directory / shard.name
        if path.is_file():
            yield from _checksum_problem(path, shard)


def _checksum_problem(path: Path, shard: PackedShard) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            found = file_digest(file)
    except OSError as error:
        yield str(unreadable(path, error))
        return
    if found != shard.sha256:
        yield f"{path}: SHA-256 {found[:12]}…, the manifest says {shard.sha256[:12]}…"
