"""`pack`: from any source to tar shards that any WebDataset reader takes.

In: a source's splits, a directory and `PackOptions`. Out: `train-00000.tar` … with `classes.json`, an
index each and the manifest `pack.json`. An interrupted pack goes on behind its last finished shard;
nothing half-written has a final name; nothing is written outside the directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.core.errors import DataError
from paceline.core.whole_file import LEFTOVERS
from paceline.data.file_lock import file_lock
from paceline.data.packing.pack_manifest import FILE_NAME as MANIFEST_FILE
from paceline.data.packing.pack_manifest import PackedSplit, PackManifest
from paceline.data.packing.pack_options import PackOptions
from paceline.data.packing.pack_split import OnSample, SplitPacker
from paceline.data.sources.class_list import FILE_NAME as CLASSES_FILE
from paceline.data.sources.class_list import read_classes
from paceline.data.sources.source_identity import source_identity
from paceline.data.sources.source_protocol import Source
from paceline.data.written_file import unwritable, write_file

_LOCK_FILE = ".pack.lock"


def pack(
    sources: Mapping[str, Source],
    directory: Path,
    options: PackOptions,
    *,
    workers: int = 1,
    on_sample: OnSample = lambda split, done, corrupt: None,
    tell: Callable[[str], None] = lambda note: None,
) -> PackManifest:
    """Packs every split of `sources` that is not packed already, and returns what is there now.

    DataError, one line, where the directory holds something else or another pack, where storage or
    disk fails, or where too many images are corrupt. What was finished before stays. `tell` is told
    where nothing keeps a second pack out of the directory.
    """
    _make_directory(directory)
    with _alone(directory) as alone:
        manifest = _manifest(directory, options)
        if alone:
            _sweep(directory)
        else:
            tell(f"{directory} knows no locks: see to it that no other pack writes there")
        for split, source in sources.items():
            _check_split(manifest, split, source, directory)
            _write_classes(directory, source)
            if not manifest.splits[split].complete:
                SplitPacker(split, source, options, manifest, on_sample).pack(directory, workers)
    return manifest


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        foreign = [p.name for p in directory.iterdir() if not p.name.startswith(".")]
    except (FileExistsError, NotADirectoryError):
        raise DataError(f"{directory}: is a file, not a directory", "choose another") from None
    except OSError as error:
        raise unwritable(directory, error) from None
    if foreign and MANIFEST_FILE not in foreign:
        raise DataError(
            f"{directory}: is not empty ({sorted(foreign)[0]} is there) and no pack of ours",
            "pack into an empty or a new directory",
        )


@contextmanager
def _alone(directory: Path) -> Iterator[bool]:
    """Whether it is certain that nobody else packs there."""
    with file_lock(directory / _LOCK_FILE, wait=False) as held:
        if held is False:
            raise DataError(f"{directory}: another pack is writing there", "wait for its end")
        yield held is True


def _manifest(directory: Path, options: PackOptions) -> PackManifest:
    manifest = PackManifest.read(directory)
    if manifest is None:
        manifest = PackManifest(directory, options.table())
        manifest.save()
    manifest.check_options(options.table())
    return manifest


def _check_split(manifest: PackManifest, split: str, source: Source, directory: Path) -> None:
    identity = source_identity(source)
    record = manifest.splits.setdefault(split, PackedSplit(identity, len(source)))
    if record.source != identity or record.samples != len(source):
        raise DataError(
            f"{directory}: its {split} split was packed from other data "
            f"({record.samples} samples, now {len(source)})",
            "pack into another directory",
        )
    record.check_shards(directory)


def _write_classes(directory: Path, source: Source) -> None:
    names = list(source.classes)
    known = read_classes(directory)
    if known is not None and known != names:
        raise DataError(
            f"{directory / CLASSES_FILE}: names other classes than the source",
            "pack splits of one data set, or into another directory",
        )
    if known is None:
        content = [{"cls": index, "name": name} for index, name in enumerate(names)]
        write_file(directory / CLASSES_FILE, json.dumps(content, indent=1).encode() + b"\n")


def _sweep(directory: Path) -> None:
    """Removes what an earlier pack left half-written when it was killed."""
    for path in directory.glob(LEFTOVERS):
        with suppress(OSError):
            path.unlink()
