"""`inspect_set`: what a data set holds, and what is wrong with it.

Counts each split, decodes a sample of its images, checks shards against their indexes and their
manifest, and draws a contact sheet. Nothing is changed, and nothing is taken on trust.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from paceline.core.errors import DataError
from paceline.core.files import open_regular
from paceline.data.image import CorruptImage, CorruptSample, ImageFacts, decode, image_facts
from paceline.data.order import PACK_STREAM, Int64, hash64
from paceline.data.pack.pack import file_digest
from paceline.data.pack.splits import SPLITS, open_splits
from paceline.data.prefetch import map_ahead
from paceline.data.sources.base import Source
from paceline.data.sources.index_store import UnfitIndexError, index_path, read_index
from paceline.data.sources.layouts import all_shards, data_root, kinds_of, shard_paths
from paceline.data.sources.pack_manifest import PackedShard, PackManifest
from paceline.data.sources.storage import Retry, ShardStamp, unreadable, write_file
from paceline.data.sources.tar_index import ShardIndex, scan_file

# What is being done, how much of it is done, and how much there is to do.
OnProgress = Callable[[str, int, int], None]
_NAMED = 20
_SIDE = 112
_TEXT_HEIGHT = 16
_GAP = 4
_COLUMNS = 10
_LETTERS = 17
_PAPER, _INK, _ALARM = (255, 255, 255), (30, 30, 30), (200, 30, 30)


@dataclass
class SetReport:
    """Nothing is wrong where there is no problem; a note is only good to know."""

    splits: dict[str, SplitFacts] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def table(self) -> dict[str, object]:
        """As JSON has it."""
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
    sheet: tuple[Path, int] | None = None,
    on_progress: OnProgress = lambda what, done, total: None,
) -> SetReport:
    """`look_at` None decodes every image. DataError where there is no data at all, or where the
    sheet (its path, and how many images are on it) cannot be written."""
    report = SetReport()
    shards = _shards(directory) if directory and kind in ("auto", "shards") else []
    if shards:
        report.problems += shard_problems(data_root(directory), shards, checksums, on_progress)
    try:
        sources = open_splits(directory, kind, split, report.notes.append)
    except DataError as error:
        if not report.problems:
            raise
        # Reported in full already, if it is about a shard.
        report.problems += [] if str(error) in report.problems else [str(error)]
        return report
    if shards and (unnamed := _unnamed(directory)):
        report.notes.append(
            f"skipped tars whose names have no split: {', '.join(unnamed[:_NAMED])}"
        )
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
    if sheet is not None:
        path, images = sheet
        write_file(path, contact_sheet(next(iter(sources.values())), images))
    for source in sources.values():
        source.close()
    return report


def _shards(directory: str) -> list[Path]:
    """Shards of all splits. None if the directory holds another kind of data: tars are archives then."""
    root = data_root(directory)
    kinds = {kind for split in SPLITS for kind in kinds_of(root, split)}
    if kinds and "shards" not in kinds:
        return []
    inside = {path for split in SPLITS for path in shard_paths(root, split)}
    return sorted({*all_shards(root), *inside})


def _unnamed(directory: str) -> list[str]:
    """Tars that belong to no split, beside shards that do."""
    root = data_root(directory)
    used = {path for split in SPLITS for path in shard_paths(root, split)}
    return [path.name for path in all_shards(root) if used and path not in used]


@dataclass
class SplitFacts:
    """Widths, heights, modes, formats and `looked_bytes` are those of the images looked at.
    `stored_bytes` is the size of all images, None if only reading tells."""

    samples: int
    classes: int
    per_class: tuple[int, float, int]
    empty_classes: int
    looked_at: int = 0
    looked_bytes: int = 0
    stored_bytes: int | None = None
    formats: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    widths: list[int] = field(default_factory=list)
    heights: list[int] = field(default_factory=list)
    corrupt: list[CorruptSample] = field(default_factory=list)

    def table(self) -> dict[str, object]:
        """As JSON has it."""
        return {
            "samples": self.samples,
            "classes": self.classes,
            "samples_per_class": dict(zip(("min", "median", "max"), self.per_class, strict=True)),
            "empty_classes": self.empty_classes,
            "looked_at": self.looked_at,
            "mean_bytes": self._bytes() / max(1, self.samples),
            "bytes": self._bytes(),
            "bytes_are": "estimated" if self._is_estimated() else "counted",
            "formats": dict(self.formats.most_common()),
            "modes": dict(self.modes.most_common()),
            "width": _spread(self.widths),
            "height": _spread(self.heights),
            "corrupt": [{"name": s.name, "reason": s.reason} for s in self.corrupt],
        }

    def _is_estimated(self) -> bool:
        return self.stored_bytes is None and self.looked_at < self.samples

    def _bytes(self) -> int:
        if self.stored_bytes is not None:
            return self.stored_bytes
        return round(self.looked_bytes * self.samples / max(1, self.looked_at))


def inspect_split(
    source: Source,
    look_at: int,
    workers: int,
    on_progress: OnProgress = lambda what, done, total: None,
    what: str = "images",
) -> SplitFacts:
    """Decodes `look_at` images, all if there are fewer, and every image whose file is empty or cannot be
    read. Storage that fails counts as corrupt."""
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
            found = image_facts(data)
            decode(data, found.channels)
        except (CorruptImage, DataError) as error:
            return 0, CorruptSample(index, source.name(index), str(error))
        return len(data) if isinstance(data, bytes) else data.nbytes, found

    indices, sizes = chosen(len(source), look_at), source.sizes()
    if sizes is not None:
        facts.stored_bytes = int(sizes.clip(min=0).sum())
        indices = np.union1d(indices, np.flatnonzero(sizes <= 0))
    for done, (size, found) in enumerate(map_ahead(look, indices.tolist(), workers), start=1):
        facts.looked_at = done
        facts.looked_bytes += size
        if isinstance(found, CorruptSample):
            facts.corrupt.append(found)
        else:
            facts.formats[found.format] += 1
            facts.modes[found.mode] += 1
            facts.widths.append(found.width)
            facts.heights.append(found.height)
        on_progress(what, done, len(indices))
    return facts


def chosen(count: int, wanted: int) -> Int64:
    """Indices in ascending order, `wanted` of them drawn by hash; the same ones every time."""
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
    """`paths` are the shards of all splits; with `checksums` off their bytes are not read."""
    counts: dict[str, int] = {}
    for done, path in enumerate(paths, start=1):
        on_progress("structure of shards", done, len(paths))
        if path.name.endswith("gz"):
            continue  # opening it has read all of it, under gzip's own checksum
        try:
            index = scan_file(path, Retry(0))
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
    listed: set[str] = set()
    for split, record in manifest.splits.items():
        if not record.complete:
            yield (
                f"{directory}: {split} is packed up to {record.stop} of {record.samples} samples; "
                "repeat the pack command"
            )
        for shard in record.shards:
            listed.add(shard.name)
            if shard.name not in there:
                yield f"{directory / shard.name}: is missing, the manifest has it"
            elif counts.get(shard.name, shard.samples) != shard.samples:
                yield (
                    f"{directory / shard.name}: {counts[shard.name]} samples, the manifest says "
                    f"{shard.samples}"
                )
    for name in sorted(there - listed):
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
        with open_regular(path) as file:
            found = file_digest(file)
    except OSError as error:
        yield str(unreadable(path, error))
        return
    if found != shard.sha256:
        yield f"{path}: SHA-256 {found[:12]}…, the manifest says {shard.sha256[:12]}…"


def contact_sheet(source: Source, images: int) -> bytes:
    """A PNG of at most `images` thumbnails, by class, each above the name of its class; the same
    ones every time. A corrupt image is a red square."""
    indices = chosen(len(source), images).tolist()
    indices.sort(key=lambda i: (int(source.labels[i]), i))
    columns = min(_COLUMNS, len(indices))
    rows = -(-len(indices) // columns)
    cell_width, cell_height = _SIDE + _GAP, _SIDE + _TEXT_HEIGHT + _GAP
    sheet = Image.new("RGB", (columns * cell_width + _GAP, rows * cell_height + _GAP), _PAPER)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default()
    for place, index in enumerate(indices):
        row, column = divmod(place, columns)
        left, top = column * cell_width + _GAP, row * cell_height + _GAP
        thumbnail = _thumbnail(source, index)
        # In the middle of its square, at the bottom, right above its name.
        sheet.paste(
            thumbnail, (left + (_SIDE - thumbnail.width) // 2, top + _SIDE - thumbnail.height)
        )
        draw.text((left, top + _SIDE + 1), _caption(source, index), fill=_INK, font=font)
    stream = io.BytesIO()
    sheet.save(stream, "PNG")
    return stream.getvalue()


def _thumbnail(source: Source, index: int) -> Image.Image:
    try:
        image = decode(source.read(index), 3)
    except (CorruptImage, DataError):
        return Image.new("RGB", (_SIDE, _SIDE), _ALARM)
    scale = _SIDE / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    # Small images are enlarged as they are, pixel by pixel; smoothing would hide what they hold.
    method = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BICUBIC
    return image.resize((width, height), method)


def _caption(source: Source, index: int) -> str:
    """The smallest font of Pillow knows Latin letters only."""
    name = source.classes[int(source.labels[index])]
    name = name.encode("latin-1", "replace").decode("latin-1")
    return name if len(name) <= _LETTERS else name[: _LETTERS - 2] + ".."
