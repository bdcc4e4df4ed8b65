"""`inspect_set` reports the problems of a data set; `open_splits` opens its splits.

Counts the samples of each split, decodes some images, and checks shards against their indexes and
the manifest. Changes no files.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from paceline.core.errors import ConfigError, DataError
from paceline.core.files import open_regular
from paceline.data.image import CorruptImage, CorruptSample, ImageFacts, decode, image_facts
from paceline.data.order import PACK_STREAM, Int64, hash64
from paceline.data.prefetch import map_ahead
from paceline.data.settings import DataSettings
from paceline.data.sources.base import Source, Split
from paceline.data.sources.classes import read_classes
from paceline.data.sources.index_store import open_shards
from paceline.data.sources.layouts import (
    all_shards,
    data_root,
    is_unsplit,
    kinds_of,
    shard_paths,
)
from paceline.data.sources.pack_manifest import PackedShard, PackManifest
from paceline.data.sources.registry import source_kind
from paceline.data.sources.storage import Retry, unreadable
from paceline.data.sources.tar_index import scan_file

# Receives the name of a task, the amount that is done, and the total amount.
OnProgress = Callable[[str, int, int], None]
_NAMED = 20
SPLITS: tuple[Split, ...] = ("train", "val")
_PIECE_BYTES = 4 << 20


@dataclass
class SplitFacts:
    """Number of samples, file formats and image sizes of a split.

    Attributes:
        samples: Number of samples.
        classes: Number of classes.
        per_class: Minimum, median and maximum number of samples per class.
        empty_classes: Number of classes without samples.
        looked_at: Number of images that were decoded. All following attributes describe only these.
        looked_bytes: Total size of the images as they are stored, in bytes.
        formats: Number of images per file format.
        modes: Number of images per Pillow mode.
        widths: Widths of the images in pixels.
        heights: Heights of the images in pixels.
        corrupt: Images that cannot be decoded.
    """

    samples: int
    classes: int
    per_class: tuple[int, float, int]
    empty_classes: int
    looked_at: int = 0
    looked_bytes: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    widths: list[int] = field(default_factory=list)
    heights: list[int] = field(default_factory=list)
    corrupt: list[CorruptSample] = field(default_factory=list)

    def table(self) -> dict[str, object]:
        """Returns the attributes as a dict for JSON."""
        size = round(self.looked_bytes * self.samples / max(1, self.looked_at))
        return {
            "samples": self.samples,
            "classes": self.classes,
            "samples_per_class": dict(zip(("min", "median", "max"), self.per_class, strict=True)),
            "empty_classes": self.empty_classes,
            "looked_at": self.looked_at,
            "mean_bytes": size / max(1, self.samples),
            "bytes": size,
            "bytes_are": "estimated" if self.looked_at < self.samples else "counted",
            "formats": dict(self.formats.most_common()),
            "modes": dict(self.modes.most_common()),
            "width": _spread(self.widths),
            "height": _spread(self.heights),
            "corrupt": [{"name": s.name, "reason": s.reason} for s in self.corrupt],
        }


@dataclass
class SetReport:
    """What `inspect_set` found: the counts of each split, notes and problems of the data set."""

    splits: dict[str, SplitFacts] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def table(self) -> dict[str, object]:
        """Returns the report as a dict for JSON."""
        splits = {name: facts.table() for name, facts in self.splits.items()}
        return {"splits": splits, "notes": self.notes, "problems": self.problems}


def inspect_set(
    directory: str,
    kind: str = "auto",
    split: str = "all",
    *,
    look_at: int | None = 256,
    checksums: bool = True,
    workers: int = 1,
    on_progress: OnProgress = lambda what, done, total: None,
) -> SetReport:
    """Inspects a data set.

    Args:
        directory: Directory of the data set. Empty for embedded or synthetic images.
        kind: Kind of data, with the values of `data.source`.
        split: "train", "val" or "all".
        look_at: Number of images to decode per split. None decodes all.
        checksums: Compares the SHA-256 of each shard with the manifest.
        workers: Number of threads that decode.
        on_progress: Called with the progress of each task.

    Raises:
        DataError: If the directory has no data.
    """
    report = SetReport()
    shards = _shards(directory) if directory and kind in ("auto", "shards") else []
    if shards:
        report.problems += shard_problems(data_root(directory), shards, checksums, on_progress)
    try:
        sources = open_splits(directory, kind, split, report.notes.append)
    except DataError as error:
        if not report.problems:
            raise
        if str(error) not in report.problems:
            report.problems.append(str(error))
        return report
    for name, source in sources.items():
        wanted = len(source) if look_at is None else min(look_at, len(source))
        facts = inspect_split(source, wanted, workers, on_progress, f"{name}: images")
        report.splits[name] = facts
        report.problems += [
            f"{name}: corrupt: {s.name} ({s.reason})" for s in facts.corrupt[:_NAMED]
        ]
        if len(facts.corrupt) > _NAMED:
            report.problems.append(f"{name}: {len(facts.corrupt) - _NAMED} more are corrupt")
        report.notes += [source.note] if source.note else []
        if facts.empty_classes:
            report.notes.append(f"{name}: no sample of {facts.empty_classes} classes")
        source.close()
    return report


def _shards(directory: str) -> list[Path]:
    """Returns the shards of all splits.

    If the directory has data of another kind, the result is empty: its tars are archives, not
    shards.
    """
    root = data_root(directory)
    kinds = {kind for split in SPLITS for kind in kinds_of(root, split)}
    if kinds and "shards" not in kinds:
        return []
    in_splits = (path for split in SPLITS for path in shard_paths(root, split))
    return sorted({*all_shards(root), *in_splits})


def inspect_split(
    source: Source,
    look_at: int,
    workers: int,
    on_progress: OnProgress = lambda what, done, total: None,
    what: str = "images",
) -> SplitFacts:
    """Counts the samples of a split, and decodes some of the images.

    Args:
        source: The samples of the split.
        look_at: Number of images to decode.
        workers: Number of threads that decode.
        on_progress: Called with the progress.
        what: Name of the task for `on_progress`.
    """
    counts = np.bincount(source.labels, minlength=len(source.classes))
    facts = SplitFacts(
        samples=len(source),
        classes=len(source.classes),
        per_class=(int(counts.min()), float(np.median(counts)), int(counts.max())),
        empty_classes=int((counts == 0).sum()),
    )

    def look(index: int) -> tuple[int, ImageFacts | CorruptSample]:
        try:
            data = source.read(index)
            image = image_facts(data)
            decode(data, image.channels)
        except (CorruptImage, DataError) as error:
            return 0, CorruptSample(index, source.name(index), str(error))
        return len(data) if isinstance(data, bytes) else data.nbytes, image

    indices = chosen(len(source), look_at)
    for done, (size, image) in enumerate(map_ahead(look, indices.tolist(), workers), start=1):
        facts.looked_at = done
        facts.looked_bytes += size
        if isinstance(image, CorruptSample):
            facts.corrupt.append(image)
        else:
            facts.formats[image.format] += 1
            facts.modes[image.mode] += 1
            facts.widths.append(image.width)
            facts.heights.append(image.height)
        on_progress(what, done, len(indices))
    return facts


def chosen(count: int, wanted: int) -> Int64:
    """Selects `wanted` of `count` indices by a hash, so that every call returns the same. Ascending."""
    indices = np.arange(count, dtype=np.int64)
    if wanted >= count:
        return indices
    return np.sort(np.argsort(hash64(0, PACK_STREAM, indices), kind="stable")[:wanted])


def _spread(values: list[int]) -> dict[str, float] | None:
    if not values:
        return None
    return {"min": min(values), "median": float(np.median(values)), "max": max(values)}


def shard_problems(
    directory: Path, paths: Sequence[Path], checksums: bool, on_progress: OnProgress
) -> Iterator[str]:
    """Yields a message for each problem of a shard, its index or the manifest.

    Args:
        directory: Directory of the data set.
        paths: The shards to check.
        checksums: Also reads each shard completely and compares its SHA-256 with the manifest.
        on_progress: Called with the progress.
    """
    counts: dict[str, int] = {}
    for done, path in enumerate(paths, start=1):
        on_progress("structure of shards", done, len(paths))
        if path.name.endswith("gz"):
            continue  # opening a compressed shard reads all of it and checks gzip's checksum
        try:
            counts[path.name] = len(scan_file(path, Retry(0)))
        except DataError as error:
            yield str(error)
    try:
        manifest = PackManifest.read(directory)
    except DataError as error:
        yield str(error)
        return
    if manifest is not None:
        yield from _manifest_problems(directory, manifest, {p.name for p in paths}, counts)
        if checksums:
            yield from _checksum_problems(directory, manifest, on_progress)


def _manifest_problems(
    directory: Path, manifest: PackManifest, present: set[str], counts: dict[str, int]
) -> Iterator[str]:
    listed: set[str] = set()
    for split, record in manifest.splits.items():
        if not record.complete:
            yield (
                f"{directory}: {split} is packed up to {record.stop} of {record.samples} samples; "
                "repeat the pack command"
            )
        for shard in record.shards:
            listed.add(shard.name)
            count = counts.get(shard.name, shard.samples)
            if shard.name not in present:
                yield f"{directory / shard.name}: is missing, the manifest has it"
            elif count != shard.samples:
                yield f"{directory / shard.name}: {count} samples, the manifest has {shard.samples}"
    for name in sorted(present - listed):
        yield f"{directory / name}: is not in the manifest"


def _checksum_problems(
    directory: Path, manifest: PackManifest, on_progress: OnProgress
) -> Iterator[str]:
    shards = [shard for record in manifest.splits.values() for shard in record.shards]
    for done, shard in enumerate(shards, start=1):
        on_progress("checksums of shards", done, len(shards))
        path = directory / shard.name
        if path.is_file() and (problem := _checksum_problem(path, shard)):
            yield problem


def _checksum_problem(path: Path, shard: PackedShard) -> str:
    try:
        digest = hashlib.sha256()
        with open_regular(path) as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    except OSError as error:
        return str(unreadable(path, error))
    actual = digest.hexdigest()
    if actual == shard.sha256:
        return ""
    return f"{path}: its SHA-256 is {actual[:12]}…, but the manifest has {shard.sha256[:12]}…"


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
