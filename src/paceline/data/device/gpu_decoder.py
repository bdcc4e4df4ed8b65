"""`GpuDecoder`: samples decoded and cropped on the GPU, a chunk at a time.

nvJPEG decodes, and one Triton kernel crops, resamples and flips. Samples, boxes and flips are those
of the host's decoders; pixels differ by a few levels, because decoders round and interpolate colour
differently. Files that the GPU cannot take go through the host into the same chunk, and so it is
the host that says what is corrupt, and that decodes the successor. Threads read ahead and keep the
GPU's decoder busy; neither waits for the training's stream, nor the training's stream for them.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch

from paceline.core.errors import ConfigError
from paceline.core.host import few_connections
from paceline.data.augment import SquareTransform
from paceline.data.batch import Batch, Chunk, kept_rows, mark_stream
from paceline.data.decode.decoder import BatchInProgress, Decoder, PillowDecoder
from paceline.data.decode.region import BulkRead
from paceline.data.device.nvjpeg import Decoded, DeviceImage, JpegFile, NvJpeg, jpeg_file
from paceline.data.device.nvjpeg_library import CHUNK
from paceline.data.device.streams import drained_stream, finish
from paceline.data.image import CorruptImage
from paceline.data.settings import DataSettings
from paceline.data.sources.base import Source, Stored

# At most CHUNK files to pixels on the device: `NvJpeg`.
DecodeFiles = Callable[[Sequence[JpegFile]], Decoded]
Reason = Literal["unfit", "refused"]
# Samples of one source. Beyond it, they are found out anew each time.
_MOST_REMEMBERED = 100_000
_LEVEL = 7


class GpuDecoder(Decoder):
    """`host` decodes what the GPU does not; source and transform are its."""

    def __init__(
        self,
        host: PillowDecoder,
        transform: SquareTransform,
        decode: DecodeFiles,
        name: str,
        device: torch.device,
        cutout: int,
        notes: Sequence[str] = (),
    ) -> None:
        """`name` is that of `decode`; `notes` go with the description."""
        check_crop_kernel(device, size=transform.size, cutout=cutout)
        self._host = host
        self._source = host.source
        self._transform = transform
        self._decode = decode
        self._name = name
        self.device = device
        self._cutout = cutout
        self._notes = notes
        self._local = threading.local()
        self._host_share = HostShare(host.source, name)
        self.draws = transform.draws
        self.workers = host.workers

    def begin(self, samples: int) -> GpuBatch:
        return GpuBatch(self, self._source, samples)

    def fill(self, chunk: Chunk) -> torch.Tensor:
        """The squares of a chunk on the GPU, all there."""
        progress = chunk.progress
        with self._own_stream() as stream:
            began = perf_counter()
            places, files = self._read(chunk)
            progress.add("read", perf_counter() - began)
            began = perf_counter()
            decoded = self._decode(files) if files else Decoded([], None)
            progress.add("decode", perf_counter() - began)
            self._note_failures(chunk, places, files, decoded)
            try:
                out, table, missing = self._cropped(chunk, places, files, decoded.images)
                self._fill_on_host(out, missing, chunk)
            finally:
                # Before the memory of what was read and decoded goes to others.
                began = perf_counter()
                finish(stream)
                progress.add("augment", perf_counter() - began)
            del decoded, table
        return out

    def _read(self, chunk: Chunk) -> tuple[list[int], list[JpegFile]]:
        """Rows and files of those samples that the GPU takes."""
        if not hasattr(self._local, "read"):
            self._local.read = BulkRead(self._source, pinned=self.device.type == "cuda")
        asked = [row for row, index in enumerate(chunk.wanted) if not self._host_share.takes(index)]
        wanted = [chunk.wanted[row] for row in asked]
        found: list[Stored | memoryview] = self._local.read.all(wanted, chunk.progress)
        places, files = [], []
        for row, data in zip(asked, found, strict=True):
            file = jpeg_file(data) if isinstance(data, bytes | memoryview) else None
            if file is None:
                self._host_share.add(chunk.wanted[row], "unfit")
                continue
            places.append(row)
            files.append(file)
        return places, files

    def _note_failures(
        self, chunk: Chunk, places: list[int], files: list[JpegFile], decoded: Decoded
    ) -> None:
        refused = [
            chunk.wanted[place]
            for place, file, image in zip(places, files, decoded.images, strict=True)
            if not _is_whole(image, file)
        ]
        for index in refused:
            self._host_share.add(index, "refused")
        if decoded.problem or refused:
            problem = decoded.problem or "not the size that the file says"
            self._host_share.failed(problem, refused[0] if refused else None)

    def _cropped(
        self,
        chunk: Chunk,
        places: list[int],
        files: list[JpegFile],
        images: list[DeviceImage | None],
    ) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """The chunk, the table that its kernel reads, and the rows that are still to be filled."""
        from paceline.data.device import kernels

        began = perf_counter()
        transform, size = self._transform, self._transform.size
        out = torch.empty((len(chunk), size, size, 3), dtype=torch.uint8, device=self.device)
        here, boxes = kernels.new_table(len(places))
        missing, count = set(range(len(chunk))), 0
        for place, file, image in zip(places, files, images, strict=True):
            if image is None or not _is_whole(image, file):
                continue
            numbers = chunk.numbers[place].tolist()
            flips, corner = int(transform.flips(numbers)), self._cutout_corner(numbers)
            here[count, :7] = (image.address, image.height, image.width, flips, place, *corner)
            boxes[count, kernels.BOX :] = transform.box(image.width, image.height, numbers)
            missing.discard(place)
            count += 1
        table = torch.from_numpy(here[:count]).to(self.device)
        kernels.crop_into(out, table, cutout=self._cutout)
        chunk.progress.add("augment", perf_counter() - began)
        return out, table, sorted(missing)

    def _fill_on_host(self, out: torch.Tensor, rows: list[int], chunk: Chunk) -> None:
        """Fills these rows of the chunk, while the GPU is at work on the others."""
        if not rows:
            return
        squares = np.empty((len(rows), *out.shape[1:]), dtype=np.uint8)
        for row, square in zip(rows, squares, strict=True):
            chunk.progress.check()
            self._host.fill_row(chunk, row, square)
        # One copy for all: it waits for what the stream was given before.
        places = torch.tensor(rows, device=self.device)
        out.index_copy_(0, places, torch.from_numpy(squares).to(self.device))

    def _cutout_corner(self, numbers: Sequence[float]) -> tuple[int, int]:
        """Top and left, as in `TrainTransform`."""
        if not self._cutout:
            return 0, 0
        size, half = self._transform.size, self._cutout // 2
        top, left = (int(number * size) - half for number in numbers[-2:])
        return top, left

    @contextmanager
    def _own_stream(self) -> Iterator[torch.cuda.Stream | None]:
        """This thread's stream. On a CPU, where tests interpret the kernel, there is none."""
        if self.device.type != "cuda":
            yield None
            return
        with torch.cuda.device(self.device):
            if not hasattr(self._local, "stream"):
                # Its few kernels go between those of the training, not behind them.
                stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
                self._local.stream = stream
            with torch.cuda.stream(self._local.stream):
                yield self._local.stream

    def describe(self) -> str:
        text = f"{self._name}, {self.workers} thread{'' if self.workers == 1 else 's'}"
        notes = "; ".join(filter(None, (*self._notes, few_connections())))
        return f"{text} ({notes})" if notes else text

    def note(self) -> str:
        """How many samples the GPU did not decode, and why."""
        return self._host_share.note()


class GpuBatch(BatchInProgress):
    """Chunks of a batch on the GPU; labels stay in pinned memory."""

    def __init__(self, decoder: GpuDecoder, source: Source, samples: int) -> None:
        self._decoder = decoder
        self._source = source
        # Allocated in the consumer: in a new thread, pinning would open the first GPU.
        pinned = decoder.device.type == "cuda"
        self._labels = torch.empty(samples, dtype=torch.int64, pin_memory=pinned)
        self.cuts = chunks_of(samples)
        self._parts: dict[int, torch.Tensor] = {}

    def fill(self, chunk: Chunk) -> None:
        self._parts[chunk.first] = self._decoder.fill(chunk)
        self._labels.numpy()[chunk.rows] = self._source.labels[chunk.indices]

    def finish(self, dropped: Sequence[int]) -> Batch:
        # What the consumer's stream does from here on is work, not a wait for the input.
        begun = mark_stream(self._decoder.device)
        images = _joined([self._parts[first] for first, _ in self.cuts])
        kept = kept_rows(len(self._labels), dropped)
        if kept is None:
            return Batch(images, self._labels, begun=begun)
        return Batch(images[kept.to(images.device)], self._labels[kept], begun=begun)


def _is_whole(image: DeviceImage | None, file: JpegFile) -> bool:
    """Boxes are of the size that the file says: a decoder that saw another is not believed."""
    return image is not None and image[1:] == (file.width, file.height)


def chunks_of(length: int) -> list[tuple[int, int]]:
    """Of a batch: as few as hold CHUNK at most, of about one size, whatever the number of threads."""
    count = -(-length // CHUNK)
    size = -(-length // max(1, count))
    return [(start, min(start + size, length)) for start in range(0, length, max(1, size))]


def _joined(images: list[torch.Tensor]) -> torch.Tensor:
    """One tensor, on the consumer's stream, in the order of the samples."""
    if images[0].is_cuda:
        stream = torch.cuda.current_stream(images[0].device)
        for image in images:
            # The memory is the worker's stream's, which must not take it back before this one read it.
            image.record_stream(stream)
    return images[0] if len(images) == 1 else torch.cat(images)


@dataclass
class _Known:
    """The samples of one source that the host decodes, and a message on the first failure."""

    samples: dict[int, Reason] = field(default_factory=dict)
    first: str = ""


# Loaders come and go, one for each evaluation; the source stays.
_REMEMBERED: WeakKeyDictionary[Source, _Known] = WeakKeyDictionary()


class HostShare:
    """Which samples the host decodes in place of the GPU, and how many.

    They are remembered with their source, so that a chunk meets an odd file once: from then on it
    goes straight to the host. The first failure is reported at once, the counts at the end. Used by
    many threads at once.
    """

    def __init__(self, source: Source, decoder: str) -> None:
        self._source = source
        self._decoder = decoder
        self._lock = threading.Lock()
        self._known = _REMEMBERED.setdefault(source, _Known())
        self._counts: Counter[Reason] = Counter()
        self._failures = 0

    def takes(self, index: int) -> bool:
        """Whether the host decoded this sample before; if so, it is counted."""
        why = self._known.samples.get(index)
        if why is not None:
            with self._lock:
                self._counts[why] += 1
        return why is not None

    def add(self, index: int, why: Reason) -> None:
        """`unfit`: nothing that the decoder could show as Pillow does; `refused`: it failed."""
        with self._lock:
            self._counts[why] += 1
            if len(self._known.samples) < _MOST_REMEMBERED:
                self._known.samples[index] = why

    def failed(self, problem: str, index: int | None) -> None:
        """Reports the first failure, of a sample, or of a chunk whose files are good one by one."""
        name = "a chunk" if index is None else self._source.name(index)
        with self._lock:
            self._failures += 1
            if self._known.first:
                return
            self._known.first = f"{name}: {problem}"
        way = "its files are decoded one by one" if index is None else "the host decodes it"
        sys.stderr.write(
            f"paceline: warning: {self._decoder} failed with {name} ({problem}); {way}\n"
        )

    def note(self) -> str:
        """Empty where the GPU decoded all."""
        with self._lock:
            unfit, refused, failures = (
                self._counts["unfit"],
                self._counts["refused"],
                self._failures,
            )
        reasons = [f"{unfit:,} no JPEGs for the GPU"] if unfit else []
        if refused or failures:
            first = self._known.first
            reasons.append(f"{refused:,} after the GPU's decoder failed (the first: {first})")
        if not reasons:
            return ""
        return f"{unfit + refused:,} samples were decoded on the host: {', '.join(reasons)}"


def create_decoder(
    host: PillowDecoder,
    transform: SquareTransform,
    settings: DataSettings,
    device: torch.device,
    notes: Sequence[str],
) -> GpuDecoder:
    """ConfigError if the device is no GPU, or the images are no files."""
    check_source(host.source, settings)
    if device.type != "cuda":
        raise ConfigError(
            "data.decoder",
            settings.decoder,
            f"decodes on a GPU, but the device is {device}",
            "use run.device = 'cuda', or data.decoder = 'auto'",
        )
    nvjpeg = NvJpeg(device)
    cutout = settings.cutout if transform.draws else 0
    return GpuDecoder(host, transform, nvjpeg, nvjpeg.describe(), device, cutout, notes)


def check_source(source: Source, settings: DataSettings) -> None:
    """Pixels need no decoder: all of them would go through the host, one by one."""
    try:
        encoded = not len(source) or isinstance(source.read(0), bytes)
    except CorruptImage:
        return  # which the batches report
    if not encoded:
        raise ConfigError(
            "data.decoder", settings.decoder, "decodes JPEGs, but these images are stored as pixels",
            "set data.decoder = 'auto'",
        )  # fmt: skip


def check_crop_kernel(device: torch.device, *, size: int, cutout: int) -> None:
    """Builds the kernel that the batches need, before the first of them: threads would otherwise
    all build it at once. ConfigError where it does not run here."""
    problem = _problem(device, size, cutout)
    if problem:
        raise ConfigError(
            "data.decoder", "nvjpeg", f"its crops need Triton: {problem}",
            "install triton and a C compiler, or set data.decoder = 'auto'",
        )  # fmt: skip


def _problem(device: torch.device, size: int, cutout: int) -> str:
    if importlib.util.find_spec("triton") is None:
        return "the package is not installed"
    try:
        with drained_stream(device):
            right = _stretched(device, size, cutout)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  (compilers and drivers raise what they like)
        lines = str(error).splitlines()
        return f"no kernel can be built: {lines[0][:160] if lines else type(error).__name__}"
    return "" if right else "a kernel gave a wrong result"


def _stretched(device: torch.device, size: int, cutout: int) -> bool:
    """One image of one level, stretched: it must be of that level everywhere."""
    from paceline.data.device import kernels as kernel

    image = torch.full((3, 2, 2), _LEVEL, dtype=torch.uint8, device=device)
    here, boxes = kernel.new_table(1)
    here[0, :7] = (image.data_ptr(), 2, 2, 0, 0, size, size)  # the cutout lies outside
    boxes[0, kernel.BOX :] = (0, 0, 2, 2)
    out = torch.zeros((1, size, size, 3), dtype=torch.uint8, device=device)
    kernel.crop_into(out, torch.from_numpy(here).to(device), cutout=cutout)
    return bool((out == _LEVEL).all())
