"""`ResidentSet`: a whole split, decoded once, on the device.

In: a source and the form that its images shall have. Out: pixels and labels in the device's memory,
and which samples are corrupt: these lie there as zeros, and nobody may show them to a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch

from paceline.data.corrupt import CorruptLog, CorruptSample
from paceline.data.decoding.preparer import PillowPreparer
from paceline.data.on_device.pixel_form import PixelForm, Shape
from paceline.data.prefetch import Job, Prefetcher, cut
from paceline.data.sample_reader import SampleReader
from paceline.data.sources.source import Source

_MIB = 2**20
# Bytes that are decoded in host memory at a time, before they go to the device.
_PIECE_BYTES = 16 * _MIB
_Part = list[tuple[int, CorruptSample]]


@dataclass(frozen=True)
class ResidentSet:
    """`pixels` holds a pixel a row, sample after sample, and one black pixel after the last, which
    is what lies outside of every image. Nothing of it is ever written to."""

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
    jobs = _jobs(source, form, images)
    with Prefetcher[_Part, _Part](jobs, workers, depth=max(2, workers)) as decoded:
        for part in decoded:
            corrupt.update((sample.index, sample) for _, sample in part)
    return ResidentSet(pixels, labels, shape, corrupt)


def _jobs(source: Source, form: PixelForm, images: torch.Tensor) -> Iterator[Job[_Part, _Part]]:
    """Piece by piece, so that the host never holds the whole set."""
    height, width, channels = images.shape[1:]
    prepare = PillowPreparer(form.transform((height, width, channels)), channels)
    reader = SampleReader(source, prepare, CorruptLog(len(source), 0.0))
    size = max(1, _PIECE_BYTES // (height * width * channels))
    for start in range(0, len(source), size):
        yield _job(reader, start, images[start : start + size])


def _job(reader: SampleReader, start: int, target: torch.Tensor) -> Job[_Part, _Part]:
    piece = torch.zeros(target.shape, dtype=torch.uint8)
    images = piece.numpy()
    indices = np.arange(start, start + len(piece), dtype=np.int64)
    unused_labels = np.empty_like(indices)
    chunks = [
        partial(
            reader.fill_indices,
            indices[first:last],
            images[first:last],
            unused_labels[first:last],
        )
        for first, last in cut(len(piece), 1)
    ]

    def finish(parts: list[_Part]) -> _Part:
        target.copy_(piece)
        return [unfilled for part in parts for unfilled in part]

    return Job(chunks, finish)
