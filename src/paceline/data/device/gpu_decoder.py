"""`GpuDecoder`: decodes and crops images on the GPU, several samples per call.

nvJPEG decodes, and one Triton kernel crops, resamples and flips. Samples, crops and flips are the
same as with host decoders. Pixels differ by a few levels, because decoders round and interpolate
color differently. The host decodes files that the GPU does not support. The host also reports each
corrupt file and decodes the replacement. Threads read ahead and keep the GPU's decoder busy. These
threads and the training stream do not wait for each other.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import numpy as np
import torch

from paceline.core.errors import ConfigError
from paceline.core.host import few_connections
from paceline.data.augment import SquareTransform
from paceline.data.batch import Batch, Chunk, kept_rows, mark_stream
from paceline.data.decode.decoder import (
    BatchInProgress,
    Decoder,
    PillowDecoder,
    describe_threads,
)
from paceline.data.decode.region import BulkRead
from paceline.data.device.nvjpeg import Decoded, DeviceImage, JpegFile, NvJpeg, jpeg_file
from paceline.data.device.nvjpeg_library import CHUNK
from paceline.data.device.streams import drained_stream, finish
from paceline.data.image import CorruptImage
from paceline.data.settings import DataSettings
from paceline.data.sources.base import Source, Stored

# A function that decodes at most CHUNK files to pixels on the device, such as `NvJpeg`.
DecodeFiles = Callable[[Sequence[JpegFile]], Decoded]
_LEVEL = 7


@dataclass(eq=False)
class GpuDecoder(Decoder):
    """Decodes batches on a GPU. A decoder on the host decodes files that the GPU does not support.

    Creating a decoder raises ConfigError if the crop kernel does not work on this device.

    Attributes:
        host: The decoder of files that the GPU does not support. Also provides the source.
        transform: Chooses the box and the flip of each sample.
        decode: The function that decodes files on the GPU.
        name: The name of `decode` for the description.
        device: The GPU.
        cutout: Side of the cutout in pixels, 0 for none.
        notes: Notes to add to the description.
    """

    host: PillowDecoder
    transform: SquareTransform
    decode: DecodeFiles
    name: str
    device: torch.device
    cutout: int
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_crop_kernel(self.device, size=self.transform.size, cutout=self.cutout)
        self._local = threading.local()
        self._host_samples = HostSamples(self.host.source, self.name)
        self.draws = self.transform.draws
        self.workers = self.host.workers

    def begin(self, samples: int) -> GpuBatch:
        return GpuBatch(self, self.host.source, samples)

    def fill(self, chunk: Chunk) -> torch.Tensor:
        """Returns the images of a part of a batch. Waits until the GPU has finished decoding."""
        progress = chunk.progress
        with self._own_stream() as stream:
            began = perf_counter()
            places, files = self._read(chunk)
            progress.add("read", perf_counter() - began)
            began = perf_counter()
            decoded = self.decode(files) if files else Decoded([], None)
            progress.add("decode", perf_counter() - began)
            self._note_failures(chunk, places, files, decoded)
            try:
                out, table, missing = self._cropped(chunk, places, files, decoded.images)
                self._fill_on_host(out, missing, chunk)
            finally:
                # The GPU must not use the memory of files and images after that memory is freed.
                began = perf_counter()
                finish(stream)
                progress.add("augment", perf_counter() - began)
            del decoded, table
        return out

    def _read(self, chunk: Chunk) -> tuple[list[int], list[JpegFile]]:
        """Reads the samples of a part of a batch.

        Returns the rows and the files of the samples that the GPU can decode.
        """
        if not hasattr(self._local, "read"):
            self._local.read = BulkRead(self.host.source, pinned=self.device.type == "cuda")
        rows = [row for row, index in enumerate(chunk.wanted) if not self._host_samples.has(index)]
        stored: list[Stored | memoryview] = self._local.read.all(
            [chunk.wanted[row] for row in rows], chunk.progress
        )
        places, files = [], []
        for row, data in zip(rows, stored, strict=True):
            file = jpeg_file(data) if isinstance(data, bytes | memoryview) else None
            if file is None:
                self._host_samples.add(chunk.wanted[row], "unsupported")
                continue
            places.append(row)
            files.append(file)
        return places, files

    def _note_failures(
        self, chunk: Chunk, places: list[int], files: list[JpegFile], decoded: Decoded
    ) -> None:
        failed = [
            chunk.wanted[place]
            for place, file, image in zip(places, files, decoded.images, strict=True)
            if not _is_whole(image, file)
        ]
        for index in failed:
            self._host_samples.add(index, "failed")
        if decoded.problem or failed:
            problem = decoded.problem or "not the size that the file says"
            self._host_samples.warn(problem, failed[0] if failed else None)

    def _cropped(
        self,
        chunk: Chunk,
        places: list[int],
        files: list[JpegFile],
        images: list[DeviceImage | None],
    ) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Queues the crop kernel for the decoded images.

        Returns:
            The images on the GPU, the kernel's table of image addresses and boxes (which must stay
            alive until the kernel has finished), and the rows that the host must fill.
        """
        from paceline.data.device import kernels

        began = perf_counter()
        transform, size = self.transform, self.transform.size
        out = torch.empty((len(chunk), size, size, 3), dtype=torch.uint8, device=self.device)
        host_table, boxes = kernels.new_table(len(places))
        missing, count = set(range(len(chunk))), 0
        for place, file, image in zip(places, files, images, strict=True):
            if image is None or not _is_whole(image, file):
                continue
            numbers = chunk.numbers[place].tolist()
            flips, corner = int(transform.flips(numbers)), self._cutout_corner(numbers)
            host_table[count, :7] = (
                image.address, image.height, image.width, flips, place, *corner
            )  # fmt: skip
            boxes[count, kernels.BOX :] = transform.box(image.width, image.height, numbers)
            missing.discard(place)
            count += 1
        table = torch.from_numpy(host_table[:count]).to(self.device)
        kernels.crop_into(out, table, cutout=self.cutout)
        chunk.progress.add("augment", perf_counter() - began)
        return out, table, sorted(missing)

    def _fill_on_host(self, out: torch.Tensor, rows: list[int], chunk: Chunk) -> None:
        """Fills `rows` on the host while the GPU works on the other rows."""
        if not rows:
            return
        squares = np.empty((len(rows), *out.shape[1:]), dtype=np.uint8)
        for row, square in zip(rows, squares, strict=True):
            chunk.progress.check()
            self.host.fill_row(chunk, row, square)
        places = torch.tensor(rows, device=self.device)
        out.index_copy_(0, places, torch.from_numpy(squares).to(self.device))

    def _cutout_corner(self, numbers: Sequence[float]) -> tuple[int, int]:
        """Returns the top and left edge of the cutout, the same as in `TrainTransform`."""
        if not self.cutout:
            return 0, 0
        size, half = self.transform.size, self.cutout // 2
        top, left = (int(number * size) - half for number in numbers[-2:])
        return top, left

    @contextmanager
    def _own_stream(self) -> Iterator[torch.cuda.Stream | None]:
        """Makes a separate stream of this thread current. Yields None on a CPU."""
        if self.device.type != "cuda":
            yield None
            return
        with torch.cuda.device(self.device):
            if not hasattr(self._local, "stream"):
                # High priority: the few kernels of input do not wait for the kernels of the training.
                stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
                self._local.stream = stream
            with torch.cuda.stream(self._local.stream):
                yield self._local.stream

    def describe(self) -> str:
        threads = describe_threads(self.workers, (*self.notes, few_connections()))
        return f"{self.name}, {threads}"

    def note(self) -> str:
        """Describes how many samples the host decoded instead of the GPU, and why, or returns ""."""
        return self._host_samples.note()


class GpuBatch(BatchInProgress):
    """A batch whose images are decoded into GPU memory. Its labels are in pinned host memory."""

    def __init__(self, decoder: GpuDecoder, source: Source, samples: int) -> None:
        self._decoder = decoder
        self._source = source
        # Allocated in the consumer's thread: in a new thread, pinning would initialize GPU 0.
        pinned = decoder.device.type == "cuda"
        self._labels = torch.empty(samples, dtype=torch.int64, pin_memory=pinned)
        self.cuts = chunks_of(samples)
        self._parts: dict[int, torch.Tensor] = {}

    def fill(self, chunk: Chunk) -> None:
        self._parts[chunk.first] = self._decoder.fill(chunk)
        self._labels.numpy()[chunk.rows] = self._source.labels[chunk.indices]

    def finish(self, dropped: Sequence[int]) -> Batch:
        # After this event, the consumer's stream does not wait for input.
        begun = mark_stream(self._decoder.device)
        images = _joined([self._parts[first] for first, _ in self.cuts])
        kept = kept_rows(len(self._labels), dropped)
        if kept is None:
            return Batch(images, self._labels, begun=begun)
        return Batch(images[kept.to(images.device)], self._labels[kept], begun=begun)


def _is_whole(image: DeviceImage | None, file: JpegFile) -> bool:
    """Returns True if the decoded image has the size in the file's header, as the crop assumes."""
    return image is not None and image[1:] == (file.width, file.height)


def chunks_of(length: int) -> list[tuple[int, int]]:
    """Divides `length` samples into as few equal parts as possible, of at most CHUNK samples.

    Returns:
        For each part, the index of its first sample and the index after its last one.
    """
    count = -(-length // CHUNK)
    size = -(-length // max(1, count))
    return [(start, min(start + size, length)) for start in range(0, length, max(1, size))]


def _joined(images: list[torch.Tensor]) -> torch.Tensor:
    """Concatenates the images of all parts of a batch on the current stream."""
    if images[0].is_cuda:
        stream = torch.cuda.current_stream(images[0].device)
        for image in images:
            # The worker's stream owns the memory and must not reuse it before this stream has read it.
            image.record_stream(stream)
    return images[0] if len(images) == 1 else torch.cat(images)


class HostSamples:
    """Remembers the samples that the host decoded instead of the GPU. Thread-safe.

    In later epochs, these samples go directly to the host.
    """

    def __init__(self, source: Source, decoder: str) -> None:
        self._source = source
        self._decoder = decoder
        self._lock = threading.Lock()
        self._reasons: dict[int, Literal["unsupported", "failed"]] = {}
        self._counts = {"unsupported": 0, "failed": 0}
        self._first_failure = ""

    def has(self, index: int) -> bool:
        """Returns True if the host must decode this sample, and counts the sample."""
        reason = self._reasons.get(index)
        if reason is not None:
            self.add(index, reason)
        return reason is not None

    def add(self, index: int, reason: Literal["unsupported", "failed"]) -> None:
        with self._lock:
            self._reasons[index] = reason
            self._counts[reason] += 1

    def warn(self, problem: str, index: int | None) -> None:
        """Warns once about a failure of the GPU's decoder.

        Args:
            problem: The decoder's message.
            index: The sample that failed. None if decoding several files together failed, but each
                one alone did not.
        """
        name = "a chunk" if index is None else self._source.name(index)
        with self._lock:
            if self._first_failure:
                return
            self._first_failure = f"{name}: {problem}"
        how = "its files are decoded one by one" if index is None else "the host decodes it"
        sys.stderr.write(
            f"paceline: warning: {self._decoder} failed with {name} ({problem}); {how}\n"
        )

    def note(self) -> str:
        """Describes how many samples the host decoded instead of the GPU, and why, or returns ""."""
        with self._lock:
            unsupported, failed = self._counts["unsupported"], self._counts["failed"]
        reasons = [f"{unsupported:,} not supported by the GPU"] if unsupported else []
        if self._first_failure:
            reasons.append(
                f"{failed:,} after the GPU's decoder failed (the first: {self._first_failure})"
            )
        if not reasons:
            return ""
        return f"{unsupported + failed:,} samples were decoded on the host: {', '.join(reasons)}"


def create_decoder(
    host: PillowDecoder,
    transform: SquareTransform,
    settings: DataSettings,
    device: torch.device,
    notes: Sequence[str],
) -> GpuDecoder:
    """Creates a decoder with nvJPEG.

    Args:
        host: The decoder of files that the GPU does not support.
        transform: Chooses the box and the flip of each sample.
        settings: Settings of the input pipeline.
        device: The training device.
        notes: Notes to add to the description.

    Raises:
        ConfigError: If the device is no GPU, the images are stored as pixels, or nvJPEG does not
            work.
    """
    check_source(host.source, settings)
    if device.type != "cuda":
        raise ConfigError(
            "data.decoder", settings.decoder, f"decodes on a GPU, but the device is {device}",
            "use run.device = 'cuda', or data.decoder = 'auto'",
        )  # fmt: skip
    nvjpeg = NvJpeg(device)
    cutout = settings.cutout if transform.draws else 0
    return GpuDecoder(host, transform, nvjpeg, nvjpeg.describe(), device, cutout, notes)


def check_source(source: Source, settings: DataSettings) -> None:
    """Raises ConfigError if the images are stored as pixels."""
    try:
        encoded = not len(source) or isinstance(source.read(0), bytes)
    except CorruptImage:
        return  # the loader reports it
    if not encoded:
        raise ConfigError(
            "data.decoder", settings.decoder, "decodes JPEG files, but these images are raw pixels",
            "set data.decoder = 'auto'",
        )  # fmt: skip


def check_crop_kernel(device: torch.device, *, size: int, cutout: int) -> None:
    """Compiles and tests `crop_kernel` before threads use it, so that it is compiled only once.

    Raises:
        ConfigError: If the kernel does not work on `device`.
    """
    problem = _problem(device, size, cutout)
    if problem:
        raise ConfigError(
            "data.decoder", "nvjpeg", f"cropping on the GPU needs Triton: {problem}",
            "install triton and a C compiler, or set data.decoder = 'auto'",
        )  # fmt: skip


def _problem(device: torch.device, size: int, cutout: int) -> str:
    if importlib.util.find_spec("triton") is None:
        return "the package is not installed"
    try:
        with drained_stream(device):
            correct = _stretches(device, size, cutout)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  (compilers and drivers raise any type)
        lines = str(error).splitlines()
        return f"no kernel can be built: {lines[0][:160] if lines else type(error).__name__}"
    return "" if correct else "a kernel gave a wrong result"


def _stretches(device: torch.device, size: int, cutout: int) -> bool:
    """Returns True if the crop kernel maps an image of one constant value to the same value."""
    from paceline.data.device import kernels

    image = torch.full((3, 2, 2), _LEVEL, dtype=torch.uint8, device=device)
    table, boxes = kernels.new_table(1)
    table[0, :7] = (image.data_ptr(), 2, 2, 0, 0, size, size)  # the cutout is outside of the image
    boxes[0, kernels.BOX :] = (0, 0, 2, 2)
    out = torch.zeros((1, size, size, 3), dtype=torch.uint8, device=device)
    kernels.crop_into(out, torch.from_numpy(table).to(device), cutout=cutout)
    return bool((out == _LEVEL).all())
