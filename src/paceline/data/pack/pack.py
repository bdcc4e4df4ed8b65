"""`pack_splits` writes a data set as tar shards in the WebDataset layout.

The output directory, called a pack, contains `train-00000.tar` … with their indexes, `classes.json`
and the manifest `pack.json`. An interrupted call continues after its last complete shard.
Incomplete files have temporary names. Nothing is written outside the directory.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image

from paceline.core.errors import DataError
from paceline.core.files import LEFTOVERS
from paceline.data.image import CorruptImage, CorruptSample, allowed_corrupt, decode, image_facts
from paceline.data.order import PACK_STREAM, Int64, hash64
from paceline.data.prefetch import map_ahead
from paceline.data.sources.base import Source, source_identity
from paceline.data.sources.classes import CLASSES_FILE, read_classes
from paceline.data.sources.index_store import index_path, write_index
from paceline.data.sources.pack_manifest import (
    MANIFEST_FILE,
    PackedShard,
    PackedSplit,
    PackManifest,
    PackOptions,
)
from paceline.data.sources.storage import (
    ShardStamp,
    file_lock,
    unwritable,
    write_file,
    written_file,
)
from paceline.data.sources.tar_index import NameTable, ShardIndex

_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)
_EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


class ShardWriter:
    """Writes one shard to an open file. Equal samples give equal bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._names: list[str] = []
        self._places: list[tuple[int, int, int]] = []
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._names)

    def add(self, key: str, extension: str, content: bytes, label: int) -> None:
        """Adds an image and its label as two members of the tar.

        Args:
            key: Name of both members without the extension. A number, not a name from the source.
            extension: Extension of the image.
            content: Bytes of the image file.
            label: Class index.
        """
        self._names.append(f"{key}.{extension}")
        self._places.append((self.bytes + _BLOCK, len(content), label))
        self._member(f"{key}.{extension}", content)
        self._member(f"{key}.cls", str(label).encode())

    def _member(self, name: str, content: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        self._write(member.tobuf(tarfile.USTAR_FORMAT))
        self._write(content)
        self._write(bytes(-len(content) % _BLOCK))

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)
        self.bytes += len(content)

    def finish(self) -> str:
        """Writes the end of the tar and returns the SHA-256 of the shard."""
        self._write(_END)
        return self._digest.hexdigest()

    def write_index(self, path: Path) -> None:
        """Writes the index of this shard, which must be complete and renamed to `path`."""
        offsets, sizes, labels = np.array(self._places, dtype=np.int64).reshape(-1, 3).T
        index = ShardIndex(NameTable(self._names), offsets, sizes, labels)
        write_index(index_path(path), index, ShardStamp.of(path))


@dataclass(frozen=True)
class PackedImage:
    """An image file to write into a shard. `copied` is False if the image was encoded again."""

    extension: str
    content: bytes
    copied: bool


def pack_image(data: bytes | npt.NDArray[np.uint8], options: PackOptions) -> PackedImage:
    """Returns the image file to write into a shard; encodes the image again if needed.

    Images that are small enough and have the wanted format are copied. All others are turned
    upright, scaled, and encoded as grayscale or RGB. Equal input and options give equal bytes with
    the same versions of Pillow and its libraries.

    Args:
        data: The bytes of an image file, or pixels.
        options: Maximum size, format and quality.

    Raises:
        CorruptImage: If the image cannot be decoded completely.
    """
    facts = image_facts(data)
    image = decode(data, facts.channels)
    # MPO is a JPEG file from a camera, with a second image after the first.
    current = "JPEG" if facts.format == "MPO" else facts.format
    wanted = current if options.format == "keep" else options.format.upper()
    size = fitted(image.size, options.short_side)
    if isinstance(data, bytes) and size == image.size and wanted == current in _EXTENSIONS:
        return PackedImage(_EXTENSIONS[current], data, copied=True)
    if size != image.size:
        image = image.resize(size, _FILTERS[options.filter])
    # Pixels, and formats such as GIF that cannot be kept, are encoded without loss.
    kind = wanted if wanted in _EXTENSIONS else "PNG"
    return PackedImage(_EXTENSIONS[kind], _encoded(image, kind, options.quality), copied=False)


def fitted(size: tuple[int, int], short_side: int) -> tuple[int, int]:
    """Returns the size after scaling an image to a short side of at most `short_side`."""
    shorter = min(size)
    if not short_side or shorter <= short_side:
        return size
    width, height = (max(1, round(side * short_side / shorter)) for side in size)
    return width, height


def _encoded(image: Image.Image, kind: str, quality: int) -> bytes:
    stream = io.BytesIO()
    try:
        if kind == "PNG":
            image.save(stream, kind)
        else:
            image.save(stream, kind, quality=quality)
    except (OSError, ValueError) as error:
        # The size may be too large for the format, such as 20,000 pixels in WebP.
        raise CorruptImage(f"cannot be written as {kind} ({error})") from error
    return stream.getvalue()


# Receives the name of the split, the number of processed samples, and the number of corrupt ones.
OnSample = Callable[[str, int, int], None]
Result = PackedImage | CorruptSample
_LOCK_FILE = ".pack.lock"


def pack_splits(
    sources: Mapping[str, Source],
    directory: Path,
    options: PackOptions,
    *,
    workers: int = 1,
    on_sample: OnSample = lambda split, done, corrupt: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> PackManifest:
    """Writes shards for every split that is not complete.

    Args:
        sources: The samples of each split, by the name of the split.
        directory: A new or empty directory, or an unfinished pack.
        options: The options of the pack.
        workers: Number of threads that prepare images.
        on_sample: Called with the progress.
        on_note: Called with a note if the file system has no locks, so that a second pack at the
            same time is not prevented.

    Returns:
        The manifest of the pack.

    Raises:
        DataError: If the directory has other files or a pack with other options, if reading or
            writing fails, or if too many images are corrupt. Complete shards remain.
    """
    _make_directory(directory)
    with _alone(directory) as alone:
        manifest = _manifest(directory, options)
        if alone:
            _sweep(directory)
        else:
            on_note(f"{directory} has no locks: make sure that no other pack writes there")
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
        raise DataError(
            f"{directory} is a file, not a directory", "choose another directory"
        ) from None
    except OSError as error:
        raise unwritable(directory, error) from None
    if foreign and MANIFEST_FILE not in foreign:
        raise DataError(
            f"{directory}: is not empty ({sorted(foreign)[0]}) and has no pack.json",
            "pack into an empty or a new directory",
        )


@contextmanager
def _alone(directory: Path) -> Iterator[bool]:
    """Locks the directory against other packs. Yields False if the file system has no locks."""
    with file_lock(directory / _LOCK_FILE, wait=False) as held:
        if held is False:
            raise DataError(
                f"{directory}: another paceline pack is writing to it", "wait until it ends"
            )
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
            f"{directory}: the {split} split in it was packed from other data "
            f"({record.samples} samples; the source has {len(source)})",
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
    """Removes the incomplete files that a killed pack left."""
    for path in directory.glob(LEFTOVERS):
        with suppress(OSError):
            path.unlink()


@dataclass(eq=False)
class SplitPacker:
    """Writes the shards of one split. Threads prepare images; the calling thread writes in order.

    The bytes of the shards depend on the source and the options, not on the number of threads or on
    interruptions. Processes would not be faster, because Pillow releases the interpreter lock for
    nine tenths of the time.

    Attributes:
        split: Name of the split.
        source: The samples of the split.
        options: The options of the pack.
        manifest: The manifest of the pack, with a record of this split.
        on_sample: Called with the progress.
    """

    split: str
    source: Source
    options: PackOptions
    manifest: PackManifest
    on_sample: OnSample

    def __post_init__(self) -> None:
        self._record: PackedSplit = self.manifest.splits[self.split]
        self._order = pack_order(len(self.source), self.options)
        self._limit = allowed_corrupt(self.options.max_corrupt_share, len(self.source))
        self._position = self._record.stop
        # Corrupt samples that are not in the manifest yet.
        self._pending: list[CorruptSample] = []

    def pack(self, directory: Path, workers: int) -> None:
        """Continues after the last complete shard. Raises the errors of `pack_splits`."""
        # Saved before the first shard is complete, so that readers know that shards are missing.
        self.manifest.save()
        positions = range(self._position, len(self.source))
        with closing(map_ahead(self._prepare, positions, workers)) as results:
            images = self._images(results)
            for first in images:
                self._write_shard(directory, itertools.chain([first], images))
        if not self._record.packed:
            raise DataError(f"{self.split} split: no image can be decoded", "check the source")
        self._record.corrupt += self._pending
        self._record.complete = True
        self.manifest.save()

    def _prepare(self, position: int) -> tuple[int, Result]:
        index = int(self._order[position])
        try:
            return index, pack_image(self.source.read(index), self.options)
        except CorruptImage as error:
            # Class folder and file name only, so that the manifest is independent of the directory.
            name = "/".join(self.source.name(index).split("/")[-2:])
            return index, CorruptSample(index, name, str(error))

    def _images(self, results: Iterator[tuple[int, Result]]) -> Iterator[tuple[int, PackedImage]]:
        """Yields the images that can be decoded, and records the corrupt ones."""
        for index, result in results:
            self._position += 1
            if isinstance(result, CorruptSample):
                self._pending.append(result)
            corrupt = len(self._record.corrupt) + len(self._pending)
            if corrupt > self._limit:
                first = (self._record.corrupt + self._pending)[0]
                raise DataError(
                    f"{corrupt} corrupt of {len(self.source)} images in {self.split} (allowed: "
                    f"{self._limit}); the first: {first.name}: {first.reason}",
                    "fix the data, or raise --max-corrupt-share",
                )
            self.on_sample(self.split, self._position, corrupt)
            if isinstance(result, PackedImage):
                yield index, result

    def _write_shard(self, directory: Path, images: Iterator[tuple[int, PackedImage]]) -> None:
        path = directory / f"{self.split}-{len(self._record.shards):05d}.tar"
        copied = 0
        with written_file(path) as file:
            writer = ShardWriter(file)
            for index, image in images:
                copied += image.copied
                label = int(self.source.labels[index])
                writer.add(f"{index:08d}", image.extension, image.content, label)
                if self._is_full(writer):
                    break
            digest = writer.finish()
        writer.write_index(path)
        self._record.corrupt += self._pending
        self._record.copied += copied
        self._pending = []
        self._record.shards.append(
            PackedShard(path.name, len(writer), writer.bytes, digest, self._position)
        )
        self.manifest.save()

    def _is_full(self, writer: ShardWriter) -> bool:
        most = self.options.shard_samples
        return writer.bytes >= self.options.shard_mib << 20 or 0 < most <= len(writer)


def pack_order(count: int, options: PackOptions) -> Int64:
    """Returns the order in which samples are written: shuffled by a hash, or as in the source."""
    indices = np.arange(count, dtype=np.int64)
    if not options.shuffle:
        return indices
    return np.argsort(hash64(options.seed, PACK_STREAM, indices), kind="stable")
