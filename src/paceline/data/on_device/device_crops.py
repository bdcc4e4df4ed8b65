"""`DeviceCrops`: samples decoded and cropped on the GPU, a chunk at a time.

In: sample indices and their rows of uniform numbers. Out: the squares that the model takes, in uint8 on
the GPU, all there. Boxes and flips are those of the host's way; files that the GPU's decoder cannot take
go the host's way into the same chunk, and `HostShare` remembers them. Neither does this wait for the
training's stream, nor that one for this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import numpy as np
import torch

from paceline.data.augmentation.augment import Pixels, SquareTransform
from paceline.data.cause_clock import CauseClock
from paceline.data.decoding.preparer import Stored
from paceline.data.on_device.batch_decoder import BatchDecoder, Decoded, DeviceImage
from paceline.data.on_device.host_share import HostShare
from paceline.data.on_device.jpeg_facts import JpegFile, jpeg_file
from paceline.data.on_device.own_stream import finish
from paceline.data.prefetch import Check
from paceline.data.region.bulk_read import BulkRead
from paceline.data.sources.source import Source

# Fills the given row of the chunk on the host, into the one square given.
HostWay = Callable[[int, Pixels], None]


class DeviceCrops:
    """Used by many threads at once, each with a stream of its own."""

    def __init__(
        self,
        source: Source,
        transform: SquareTransform,
        decoder: BatchDecoder,
        device: torch.device,
        cutout: int,
        clock: CauseClock,
    ) -> None:
        self._source = source
        self._transform = transform
        self._decoder = decoder
        self._device = device
        self._cutout = cutout
        self._clock = clock
        self._local = threading.local()
        self.host_share = HostShare(source, decoder.describe())

    def __call__(
        self,
        indices: Sequence[int],
        rows: Sequence[Sequence[float]],
        host_way: HostWay,
        check: Check,
    ) -> torch.Tensor:
        """`rows` has one for each index, empty where the transform takes none."""
        with self._own_stream() as stream:
            began = perf_counter()
            places, files = self._read(indices, check)
            self._clock.add("read", perf_counter() - began)
            began = perf_counter()
            decoded = self._decoder(files) if files else Decoded([], None)
            self._clock.add("decode", perf_counter() - began)
            self._note_failures(indices, places, files, decoded)
            try:
                out, table, missing = self._filled(indices, rows, places, files, decoded.images)
                self._from_host(out, missing, host_way, check)
            finally:
                # Before the memory of what was read and decoded goes to others.
                began = perf_counter()
                finish(stream)
                self._clock.add("augment", perf_counter() - began)
            del decoded, table
        return out

    def _read(self, indices: Sequence[int], check: Check) -> tuple[list[int], list[JpegFile]]:
        """Rows and files of those samples that the GPU takes."""
        if not hasattr(self._local, "read"):
            self._local.read = BulkRead(self._source, pinned=self._device.type == "cuda")
        asked = [row for row, index in enumerate(indices) if not self.host_share.takes(index)]
        wanted = [indices[row] for row in asked]
        found: list[Stored | memoryview] = self._local.read.all(wanted, check)
        places, files = [], []
        for row, data in zip(asked, found, strict=True):
            file = jpeg_file(data) if isinstance(data, bytes | memoryview) else None
            if file is None:
                self.host_share.add(indices[row], "unfit")
                continue
            places.append(row)
            files.append(file)
        return places, files

    def _note_failures(
        self,
        indices: Sequence[int],
        places: list[int],
        files: list[JpegFile],
        decoded: Decoded,
    ) -> None:
        refused = [
            indices[place]
            for place, file, image in zip(places, files, decoded.images, strict=True)
            if not _is_whole(image, file)
        ]
        for index in refused:
            self.host_share.add(index, "refused")
        if decoded.problem or refused:
            problem = decoded.problem or "not the size that the file says"
            self.host_share.failed(problem, refused[0] if refused else None)

    def _filled(
        self,
        indices: Sequence[int],
        rows: Sequence[Sequence[float]],
        places: list[int],
        files: list[JpegFile],
        images: list[DeviceImage | None],
    ) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """The chunk, what its kernel reads from, and its rows that are still to be filled."""
        from paceline.data.on_device import crop_kernel as kernel

        began = perf_counter()
        transform, size = self._transform, self._transform.size
        out = torch.empty((len(indices), size, size, 3), dtype=torch.uint8, device=self._device)
        here, boxes = kernel.new_table(len(places))
        missing, count = set(range(len(indices))), 0
        for place, file, image in zip(places, files, images, strict=True):
            if image is None or not _is_whole(image, file):
                continue
            row = rows[place]
            flips, hole = int(transform.flips(row)), self._hole(row)
            here[count, :7] = (image.address, image.height, image.width, flips, place, *hole)
            boxes[count, kernel.BOX :] = transform.box(image.width, image.height, row)
            missing.discard(place)
            count += 1
        table = torch.from_numpy(here[:count]).to(self._device)
        kernel.crop_into(out, table, hole=self._cutout, interleaved=self._decoder.interleaved)
        self._clock.add("augment", perf_counter() - began)
        return out, table, sorted(missing)

    def _from_host(
        self, out: torch.Tensor, rows: list[int], host_way: HostWay, check: Check
    ) -> None:
        """Fills these rows of the chunk, while the GPU is at work on the others."""
        if not rows:
            return
        squares = np.empty((len(rows), *out.shape[1:]), dtype=np.uint8)
        for row, square in zip(rows, squares, strict=True):
            check()
            host_way(row, square)
        # One copy for all: it waits for what the stream was given before.
        places = torch.tensor(rows, device=self._device)
        out.index_copy_(0, places, torch.from_numpy(squares).to(self._device))

    def _hole(self, row: Sequence[float]) -> tuple[int, int]:
        """Top and left, as `TrainTransform` has them."""
        if not self._cutout:
            return 0, 0
        top, left = (int(number * self._transform.size) - self._cutout // 2 for number in row[-2:])
        return top, left

    @contextmanager
    def _own_stream(self) -> Iterator[torch.cuda.Stream | None]:
        """This thread's stream. On a CPU, where tests interpret the kernel, there is none."""
        if self._device.type != "cuda":
            yield None
            return
        with torch.cuda.device(self._device):
            if not hasattr(self._local, "stream"):
                # Its few kernels go between those of the training, not behind them.
                stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
                self._local.stream = stream
            with torch.cuda.stream(self._local.stream):
                yield self._local.stream


def _is_whole(image: DeviceImage | None, file: JpegFile) -> bool:
    """Boxes are of the size that the file says: a decoder that saw another is not believed."""
    return image is not None and image[1:] == (file.width, file.height)
