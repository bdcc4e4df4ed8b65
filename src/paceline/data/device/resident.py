"""`ResidentSet`: a whole split, decoded once into the device's memory; and `ResidentDecoder`, which
makes batches of it.

The batches are those of the host's decoders. Only a few whole numbers a sample travel to the
device, drawn one batch ahead by one thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from weakref import WeakKeyDictionary

import numpy as np
import torch
from PIL import Image

from paceline.core.errors import ConfigError
from paceline.data.augment import FitTransform, Pixels, Transform, pixels_of
from paceline.data.batch import Batch, Chunk, CorruptLog, kept_rows, mark_stream
from paceline.data.decode.decoder import BatchInProgress, Decoder, PillowDecoder
from paceline.data.device.augment import AugmentNumbers, DeviceAugment
from paceline.data.image import CorruptImage, CorruptSample, decode
from paceline.data.prefetch import Job, Prefetcher, Progress, cut
from paceline.data.settings import DataSettings
from paceline.data.sources.base import Source

# Height, width and channels.
Shape = tuple[int, int, int]
_MIB = 2**20
# Bytes that are decoded in host memory at a time, before they go to the device.
_PIECE_BYTES = 16 * _MIB


class UnequalSizesError(Exception):
    """Images that must be equal in size are not; `str()` says which two."""


@dataclass(frozen=True)
class PixelForm:
    """In which form the images of a resident set lie on the device: as stored, where a random box
    is yet to be cut from them, or fitted to the square that the model takes. Equal forms hold equal
    pixels.

    `size` 0 keeps images as they are stored; `short_side` and `interpolation` then mean nothing.
    """

    channels: int
    size: int = 0
    short_side: int = 0
    interpolation: str = ""

    @classmethod
    def for_training(cls, settings: DataSettings) -> PixelForm:
        if settings.augment == "random_resized_crop":
            return cls(settings.channels)
        size = settings.image_size
        return cls(settings.channels, size, size, settings.interpolation)

    @classmethod
    def for_evaluation(cls, settings: DataSettings) -> PixelForm:
        size = settings.image_size
        return cls(settings.channels, size, settings.eval_resize or size, settings.interpolation)

    def shape(self, source: Source) -> Shape | None:
        """Height, width and channels; None where they follow from the images and none is good."""
        if self.size:
            return self.size, self.size, self.channels
        if source.pixels is not None:
            height, width = source.pixels.shape[1:3]
            return height, width, self.channels
        for index in range(len(source)):
            try:
                image = decode(source.read(index), self.channels)
            except CorruptImage:
                continue
            return image.height, image.width, self.channels
        return None

    def ready(self, source: Source) -> Pixels | None:
        """The pixels of all samples, where the source has them in this very form."""
        pixels = source.pixels
        if pixels is None or pixels.shape[3] != self.channels:
            return None
        fits = pixels.shape[1] == pixels.shape[2] == self.size == self.short_side
        return pixels if fits or not self.size else None

    def transform(self, shape: Shape) -> Transform:
        if self.size:
            return FitTransform(self.size, self.short_side, self.interpolation)
        return _AsStored(shape)


class _AsStored:
    size = draws = 0

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def __call__(self, image: Image.Image, row: Sequence[float], out: Pixels) -> None:
        pixels = pixels_of(image)
        if pixels.shape != self._shape:
            height, width, _ = self._shape
            raise UnequalSizesError(
                f"images of {width} × {height} and of {image.width} × {image.height}"
            )
        out[...] = pixels


@dataclass(frozen=True)
class ResidentSet:
    """A whole split, decoded once, on the device. Corrupt samples lie there as zeros, and must not
    be shown to a model.

    `pixels` holds a pixel a row, sample after sample, and one black pixel after the last, which is
    what lies outside of every image. Nothing of it is ever written to.
    """

    pixels: torch.Tensor
    labels: torch.Tensor
    shape: Shape
    corrupt: Mapping[int, CorruptSample]

    @property
    def images(self) -> torch.Tensor:
        """Samples × height × width × channels."""
        return self.pixels[:-1].view(-1, *self.shape)

    @property
    def device(self) -> torch.device:
        return self.pixels.device

    def __len__(self) -> int:
        return len(self.labels)

    def describe(self) -> str:
        return f"resident on {self.device}, {mib(len(self), self.shape):,.0f} MiB"


class ResidentDecoder(Decoder):
    """Training: augments on the device. Evaluation, without `settings`: the images lie ready."""

    def __init__(self, held: ResidentSet, settings: DataSettings | None = None) -> None:
        self.held = held
        self.numbers: AugmentNumbers | None = None
        self.augment: DeviceAugment | None = None
        self.draws = self.workers = 0
        self.corrupt = tuple(held.corrupt.values())
        if settings is not None:
            height, width, _ = held.shape
            self.numbers = AugmentNumbers(settings, height, width)
            self.augment = DeviceAugment(held.pixels, held.shape, settings)
            self.draws = self.numbers.draws
            # The hashes of a batch take a millisecond: more threads would only wait for one another.
            self.workers = min(1, settings.workers)

    def begin(self, samples: int) -> ResidentBatch:
        return ResidentBatch(self, samples)

    def describe(self) -> str:
        return self.held.describe()


class ResidentBatch(BatchInProgress):
    """The sample of each row, and its augmentation below, as whole numbers."""

    def __init__(self, decoder: ResidentDecoder, samples: int) -> None:
        self._decoder = decoder
        self.cuts = [(0, samples)]
        rows = 1 + (0 if decoder.numbers is None else decoder.numbers.count)
        # Allocated here, in the consumer: in a new thread, pinning would open the first GPU.
        pinned = decoder.held.device.type == "cuda"
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
        held, augment = self._decoder.held, self._decoder.augment
        kept = kept_rows(self._numbers.shape[1], dropped)
        numbers = self._numbers if kept is None else self._numbers[:, kept]
        # What the consumer's stream does from here on is work, not a wait for the input.
        begun = mark_stream(held.device)
        there = numbers.to(held.device, non_blocking=True)
        labels = held.labels.index_select(0, there[0])
        if augment is None:
            return Batch(held.images.index_select(0, there[0]), labels, begun=begun)
        return Batch(augment(there[0], there[1:]), labels, begun=begun)


# One set for each source, form and device, as long as somebody holds the source: a run evaluates
# many times, and a process may hold several runs.
_HELD: WeakKeyDictionary[Source, dict[tuple[PixelForm, torch.device], ResidentSet]] = (
    WeakKeyDictionary()
)


def resident_set(
    source: Source, form: PixelForm, shape: Shape, workers: int, device: torch.device
) -> ResidentSet:
    """The set already held, or a new one. UnequalSizesError where `form` asks for equal sizes."""
    held = _HELD.setdefault(source, {})
    if (form, device) not in held:
        held[form, device] = _decoded(source, form, shape, workers, device)
    return held[form, device]


def mib(samples: int, shape: Shape) -> float:
    height, width, channels = shape
    return samples * height * width * channels / _MIB


def _decoded(
    source: Source, form: PixelForm, shape: Shape, workers: int, device: torch.device
) -> ResidentSet:
    height, width, channels = shape
    pixels = torch.empty(
        (len(source) * height * width + 1, channels), dtype=torch.uint8, device=device
    )
    pixels[-1] = 0
    # A copy: the source's own array may be read-only, which torch warns about.
    labels = torch.from_numpy(source.labels.copy()).to(device)
    images = pixels[:-1].view(-1, *shape)
    ready = form.ready(source)
    if ready is not None:
        images.copy_(torch.from_numpy(ready))
        return ResidentSet(pixels, labels, shape, {})
    corrupt: dict[int, CorruptSample] = {}
    decoder = PillowDecoder(source, form.transform(shape), channels=channels)
    jobs = _jobs(decoder, images)
    with Prefetcher[Chunk, list[CorruptSample]](jobs, workers, depth=max(2, workers)) as decoded:
        for part in decoded:
            corrupt.update((sample.index, sample) for sample in part)
    return ResidentSet(pixels, labels, shape, corrupt)


def _jobs(
    decoder: PillowDecoder, images: torch.Tensor
) -> Iterator[Job[Chunk, list[CorruptSample]]]:
    """Piece by piece, so that the host never holds the whole set."""
    size = max(1, _PIECE_BYTES // math.prod(images.shape[1:]))
    for start in range(0, len(images), size):
        yield _job(decoder, start, images[start : start + size])


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


# Largest decoded split that `data.resident = "auto"` keeps on the device.
RESIDENT_MAX_MIB = 4096


def create_decoder(
    source: Source, settings: DataSettings, device: torch.device, training: bool
) -> tuple[ResidentDecoder | None, str]:
    """A decoder of the whole split on the device; else None, and why. ConfigError if `data.resident` is
    on and this cannot be done."""
    wanted = settings.resident
    if not source.is_constant:
        if wanted == "auto":
            return None, "not resident: the images change between reads"
        raise ConfigError(
            "data.resident", wanted, f"{source.kind} gives other images at every read",
            "set data.resident = 'off', or move random transforms to `augment`",
        )  # fmt: skip
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    form = PixelForm.for_training(settings) if training else PixelForm.for_evaluation(settings)
    shape = form.shape(source)
    if shape is None:
        return None, "not resident: no sample can be decoded"  # which the threads report
    size = mib(len(source), shape)
    if wanted == "auto" and size > RESIDENT_MAX_MIB:
        return None, f"not resident: {size:,.0f} MiB, over {RESIDENT_MAX_MIB:,}"
    try:
        held = resident_set(source, form, shape, settings.workers, device)
    except UnequalSizesError as error:
        if wanted == "auto":
            return None, f"not resident: {error}"
        raise ConfigError(
            "data.resident",
            wanted,
            f"random_resized_crop on the device needs images of one size, there are {error}",
            "set data.resident = 'off', or data.augment = 'pad_crop'",
        ) from None
    except torch.OutOfMemoryError:
        # Not off by itself: ranks, and a resumed run, must not go different ways by chance.
        raise ConfigError(
            "data.resident",
            wanted,
            f"no room for {size:,.0f} MiB on {device}",
            "set data.resident = 'off'",
        ) from None
    return ResidentDecoder(held, settings if training else None), ""
