"""Keeps all decoded images of a split in GPU memory (`data.resident`).

`ResidentSet` has the images, and `ResidentDecoder` makes batches of them. The batches equal those
of decoders on the host. Only a few integers per sample are sent to the device. One thread computes
these integers one batch ahead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from weakref import WeakKeyDictionary

import numpy as np
import torch

from paceline.core.errors import ConfigError
from paceline.data.augment import FitTransform, Pixels
from paceline.data.batch import Batch, Chunk, CorruptLog, kept_rows, mark_stream
from paceline.data.decode.decoder import BatchInProgress, Decoder, PillowDecoder
from paceline.data.device.augment import AugmentNumbers, DeviceAugment
from paceline.data.image import CorruptSample
from paceline.data.prefetch import Job, Prefetcher, Progress, cut
from paceline.data.settings import DataSettings
from paceline.data.sources.base import Source

# Height, width and channels.
Shape = tuple[int, int, int]
_MIB = 2**20
# Largest decoded split that `data.resident = "auto"` keeps on the device.
RESIDENT_MAX_MIB = 4096
# Size of the pixels that are decoded in host memory at a time.
_PIECE_BYTES = 16 * _MIB


@dataclass(frozen=True)
class PixelForm:
    """Size, channels and resampling filter of the images that a `ResidentSet` stores.

    Attributes:
        channels: 1 or 3.
        size: Side of the square in pixels.
        short_side: Short side in pixels to which an image is resized before the center crop.
        interpolation: Name of the resampling filter.
    """

    channels: int
    size: int
    short_side: int
    interpolation: str

    @classmethod
    def of(cls, settings: DataSettings, *, training: bool) -> PixelForm:
        """Returns how images are stored for training, or for evaluation, according to the settings."""
        size = settings.image_size
        short_side = size if training else settings.eval_resize or size
        return cls(settings.channels, size, short_side, settings.interpolation)

    @property
    def shape(self) -> Shape:
        return self.size, self.size, self.channels

    def ready(self, source: Source) -> Pixels | None:
        """Returns the decoded images of `source` if they already have this size, else None."""
        pixels = source.pixels
        if pixels is None or pixels.shape[1:] != self.shape or self.size != self.short_side:
            return None
        return pixels

    def transform(self) -> FitTransform:
        return FitTransform(self.size, self.short_side, self.interpolation)


@dataclass(frozen=True)
class ResidentSet:
    """All decoded images of a split, in memory of the device. Must not be modified.

    Attributes:
        pixels: Pixels × channels, uint8: the pixels of all images one after the other, then one
            black pixel for positions outside of images. Corrupt samples are zeros.
        labels: The class index of each sample.
        shape: Height, width and channels of an image.
        corrupt: The corrupt samples by sample index.
    """

    pixels: torch.Tensor
    labels: torch.Tensor
    shape: Shape
    corrupt: Mapping[int, CorruptSample]

    @property
    def images(self) -> torch.Tensor:
        """The pixels as samples × height × width × channels."""
        return self.pixels[:-1].view(-1, *self.shape)

    @property
    def device(self) -> torch.device:
        return self.pixels.device

    def __len__(self) -> int:
        return len(self.labels)

    def describe(self) -> str:
        return f"resident on {self.device}, {mib(len(self), self.shape):,.0f} MiB"


class ResidentDecoder(Decoder):
    """Makes batches of images that stay decoded in GPU memory (`ResidentSet`).

    If `settings` is given, augments the images on the GPU.
    """

    def __init__(self, resident: ResidentSet, settings: DataSettings | None = None) -> None:
        self.resident = resident
        self.numbers: AugmentNumbers | None = None
        self.augment: DeviceAugment | None = None
        self.draws = self.workers = 0
        self.corrupt = tuple(resident.corrupt.values())
        if settings is not None:
            self.numbers = AugmentNumbers(settings)
            self.augment = DeviceAugment(resident.pixels, settings)
            self.draws = self.numbers.draws
            # The random numbers of a batch take a millisecond, so one thread is enough.
            self.workers = min(1, settings.workers)

    def begin(self, samples: int) -> ResidentBatch:
        return ResidentBatch(self, samples)

    def describe(self) -> str:
        return self.resident.describe()


class ResidentBatch(BatchInProgress):
    """A batch of images from a `ResidentSet`: threads write sample indices and augmentation choices."""

    def __init__(self, decoder: ResidentDecoder, samples: int) -> None:
        self._decoder = decoder
        self.cuts = [(0, samples)]
        rows = 1 + (0 if decoder.numbers is None else decoder.numbers.count)
        # Allocated in the consumer's thread: in a new thread, pinning would initialize GPU 0.
        pinned = decoder.resident.device.type == "cuda"
        self._numbers = torch.empty((rows, samples), dtype=torch.int64, pin_memory=pinned)

    def fill(self, chunk: Chunk) -> None:
        start = perf_counter()
        chunk.replace_known()
        numbers = self._numbers.numpy()
        numbers[0] = chunk.indices
        if self._decoder.numbers is not None:
            self._decoder.numbers.fill(chunk.numbers, numbers[1:])
        chunk.progress.add("augment", perf_counter() - start)

    def finish(self, dropped: Sequence[int]) -> Batch:
        resident, augment = self._decoder.resident, self._decoder.augment
        kept = kept_rows(self._numbers.shape[1], dropped)
        numbers = self._numbers if kept is None else self._numbers[:, kept]
        # After this event, the consumer's stream does not wait for input.
        begun = mark_stream(resident.device)
        numbers = numbers.to(resident.device, non_blocking=True)
        labels = resident.labels.index_select(0, numbers[0])
        if augment is None:
            return Batch(resident.images.index_select(0, numbers[0]), labels, begun=begun)
        return Batch(augment(numbers[0], numbers[1:]), labels, begun=begun)


# One set per source, form and device, kept as long as the source exists. A run evaluates many times, and
# a process may have several runs.
_SETS: WeakKeyDictionary[Source, dict[tuple[PixelForm, torch.device], ResidentSet]] = (
    WeakKeyDictionary()
)


def resident_set(
    source: Source, form: PixelForm, workers: int, device: torch.device
) -> ResidentSet:
    """Returns all decoded images of a split in GPU memory. Only the first call decodes them.

    Args:
        source: The samples of the split.
        form: Size and channels of the stored images.
        workers: Number of threads that decode.
        device: The device that stores the images.
    """
    sets = _SETS.setdefault(source, {})
    if (form, device) not in sets:
        sets[form, device] = _decoded(source, form, workers, device)
    return sets[form, device]


def mib(samples: int, shape: Shape) -> float:
    return samples * math.prod(shape) / _MIB


def _decoded(source: Source, form: PixelForm, workers: int, device: torch.device) -> ResidentSet:
    shape, count = form.shape, len(source) * form.size**2 + 1
    pixels = torch.empty((count, form.channels), dtype=torch.uint8, device=device)
    pixels[-1] = 0
    # A copy, because torch warns about arrays that are read-only.
    labels = torch.from_numpy(source.labels.copy()).to(device)
    images = pixels[:-1].view(-1, *shape)
    ready = form.ready(source)
    if ready is not None:
        images.copy_(torch.from_numpy(ready))
        return ResidentSet(pixels, labels, shape, {})
    corrupt: dict[int, CorruptSample] = {}
    decoder = PillowDecoder(source, form.transform(), channels=form.channels)
    # Decoded in pieces, so that the host never holds all pixels.
    size = max(1, _PIECE_BYTES // math.prod(shape))
    jobs = (
        _job(decoder, start, images[start : start + size]) for start in range(0, len(images), size)
    )
    with Prefetcher[Chunk, list[CorruptSample]](jobs, workers, depth=max(2, workers)) as decoded:
        for part in decoded:
            corrupt.update((sample.index, sample) for sample in part)
    return ResidentSet(pixels, labels, shape, corrupt)


def _job(
    decoder: PillowDecoder, start: int, target: torch.Tensor
) -> Job[Chunk, list[CorruptSample]]:
    piece = torch.zeros(target.shape, dtype=torch.uint8)
    indices = np.arange(start, start + len(piece), dtype=np.int64)
    log = CorruptLog(len(decoder.source), 0.0)

    def fill(rows: tuple[int, int], progress: Progress) -> Chunk:
        chunk = Chunk.of_indices(indices, rows, log, progress)
        decoder.fill(chunk, piece.numpy()[chunk.rows])
        return chunk

    def finish(chunks: list[Chunk]) -> list[CorruptSample]:
        target.copy_(piece)
        return [sample for chunk in chunks for sample in chunk.corrupt]

    return Job([partial(fill, rows) for rows in cut(len(piece), 1)], finish)


def create_decoder(
    source: Source, settings: DataSettings, device: torch.device, training: bool
) -> tuple[ResidentDecoder | None, str]:
    """Creates a decoder that keeps all decoded images of the split in GPU memory.

    Args:
        source: The samples of the split.
        settings: Settings of the input pipeline.
        device: The training device.
        training: True to augment the images.

    Returns:
        The decoder and "". If the images cannot be kept in GPU memory and `data.resident` is
        "auto", None and the reason.

    Raises:
        ConfigError: If `data.resident` is "on" and the images change between reads, or if GPU
            memory is too small.
    """
    wanted = settings.resident
    if not source.is_constant:
        if wanted == "auto":
            return None, "not resident: the images change between reads"
        raise _error(
            settings, f"{source.kind} gives different images at every read",
            "or move random transforms to `augment`",
        )  # fmt: skip
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    form = PixelForm.of(settings, training=training)
    size = mib(len(source), form.shape)
    if wanted == "auto" and size > RESIDENT_MAX_MIB:
        return None, f"not resident: {size:,.0f} MiB, over {RESIDENT_MAX_MIB:,}"
    try:
        resident = resident_set(source, form, settings.workers, device)
    except torch.OutOfMemoryError:
        # An error even with "auto", because ranks and resumed runs must not choose differently by chance.
        raise _error(
            settings, f"the decoded images need {size:,.0f} MiB, more than {device} has free"
        ) from None
    return ResidentDecoder(resident, settings if training else None), ""


def _error(settings: DataSettings, problem: str, alternative: str = "") -> ConfigError:
    remedy = "set data.resident = 'off'" + (f", {alternative}" if alternative else "")
    return ConfigError("data.resident", settings.resident, problem, remedy)
