"""Packs one split: images through threads, shards in order.

In: a source and the options. Out: finished shards, each told to the manifest; shards and their bytes
depend on the source and the options, never on the number of threads or on where an earlier try ended.
Threads do: Pillow decodes and scales outside the interpreter lock, nine tenths of an image's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from paceline.core.errors import DataError
from paceline.data.corrupt import CorruptSample, allowed_corrupt
from paceline.data.decoding.decode import CorruptImage
from paceline.data.packing.in_order import in_order
from paceline.data.packing.pack_image import PackedImage, pack_image
from paceline.data.packing.pack_manifest import PackedShard, PackedSplit, PackManifest
from paceline.data.packing.pack_options import PackOptions
from paceline.data.packing.pack_shard import ShardWriter
from paceline.data.randomness import PACK_STREAM, Int64, hash64
from paceline.data.sources.source_protocol import Source
from paceline.data.written_file import written_file

OnSample = Callable[[str, int, int], None]
Result = PackedImage | CorruptSample


@dataclass
class _Progress:
    """What the shard under way adds to the manifest once it is finished."""

    corrupt: list[CorruptSample] = field(default_factory=list)
    copied: int = 0


class _NothingToKeep(Exception):  # noqa: N818 - takes back a file, fails nothing
    pass


class SplitPacker:
    """`on_sample(split, done, corrupt)` is told of each sample, from the caller's own thread."""

    def __init__(
        self,
        split: str,
        source: Source,
        options: PackOptions,
        manifest: PackManifest,
        on_sample: OnSample,
    ) -> None:
        self._name = split
        self._source = source
        self._options = options
        self._manifest = manifest
        self._record: PackedSplit = manifest.splits[split]
        self._order = pack_order(len(source), options)
        self._limit = allowed_corrupt(options.max_corrupt_share, len(source))
        self._on_sample = on_sample

    def pack(self, directory: Path, workers: int) -> None:
        """Goes on behind the last finished shard. DataError: too many corrupt, storage, disk."""
        # Before the first shard has its name: whoever finds one must find that it is not all.
        self._manifest.save()
        start = self._record.stop
        results = in_order(self._prepare, range(start, len(self._source)), workers)
        with closing(results):
            while start < len(self._source):
                start = self._shard(directory, start, results)
        if not self._record.packed:
            raise DataError(f"{self._name}: no image that can be decoded", "look at the source")
        self._record.complete = True
        self._manifest.save()

    def _shard(self, directory: Path, start: int, results: Iterator[tuple[int, Result]]) -> int:
        """Writes one shard and returns where the next begins."""
        path = directory / f"{self._name}-{len(self._record.shards):05d}.tar"
        progress = _Progress()
        stop, digest = start, ""
        with suppress(_NothingToKeep), written_file(path) as file:
            writer = ShardWriter(file)
            for index, result in results:
                stop += 1
                self._take(writer, progress, index, result)
                self._on_sample(self._name, stop, self._corrupt_so_far(progress))
                if self._full(writer):
                    break
            if not len(writer):
                raise _NothingToKeep  # the source ended with corrupt images only
            digest = writer.finish(path)
        self._record.corrupt += progress.corrupt
        self._record.copied += progress.copied
        if not digest:
            return stop
        writer.write_index(path)
        shard = PackedShard(path.name, len(writer), writer.bytes, digest, stop)
        self._record.shards.append(shard)
        self._manifest.save()
        return stop

    def _take(self, writer: ShardWriter, progress: _Progress, index: int, result: Result) -> None:
        if isinstance(result, PackedImage):
            progress.copied += result.copied
            label = int(self._source.labels[index])
            writer.add(f"{index:08d}", result.extension, result.content, label)
            return
        progress.corrupt.append(result)
        count = self._corrupt_so_far(progress)
        if count > self._limit:
            first = (self._record.corrupt + progress.corrupt)[0]
            raise DataError(
                f"{count} corrupt of {len(self._source)} images in {self._name} (allowed: "
                f"{self._limit}); the first: {first.name}: {first.reason}",
                "mend the data, or raise --max-corrupt-share",
            )

    def _corrupt_so_far(self, progress: _Progress) -> int:
        return len(self._record.corrupt) + len(progress.corrupt)

    def _full(self, writer: ShardWriter) -> bool:
        most = self._options.shard_samples
        return writer.bytes >= self._options.shard_mib << 20 or 0 < most <= len(writer)

    def _prepare(self, position: int) -> tuple[int, Result]:
        index = int(self._order[position])
        try:
            return index, pack_image(self._source.read(index), self._options)
        except CorruptImage as error:
            # Class and file: where the source lay is no part of what was packed.
            name = "/".join(self._source.name(index).split("/")[-2:])
            return index, CorruptSample(index, name, str(error))


def pack_order(count: int, options: PackOptions) -> Int64:
    """Every index once: sorted by its hash, or as the source has them."""
    indices = np.arange(count, dtype=np.int64)
    if not options.shuffle:
        return indices
    return np.argsort(hash64(options.seed, PACK_STREAM, indices), kind="stable")
