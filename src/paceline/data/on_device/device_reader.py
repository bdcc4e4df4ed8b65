"""`DeviceReader`: from samples' indices to their pixels on the GPU, and what happens to corrupt ones.

In: a source, a transform and the order of the stream. Out: chunks of a batch on the GPU and their labels,
and the corrupt samples met. What the GPU's decoder does not take, `SampleReader` prepares on the host,
one sample at a time, and so it is the host that says what is corrupt, and which successor steps in.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.core.errors import ConfigError
from paceline.core.gpu_connections import few_connections
from paceline.data.augmentation.augment import Pixels, SquareTransform
from paceline.data.augmentation.augment_extras import extra_draws
from paceline.data.cause_clock import CauseClock
from paceline.data.corrupt import CorruptLog, CorruptSample
from paceline.data.decoding.create_preparer import create_preparer
from paceline.data.eval_passes import Unfilled
from paceline.data.on_device.batch_decoder import create_batch_decoder
from paceline.data.on_device.crop_check import check_crop_kernel
from paceline.data.on_device.device_crops import DeviceCrops
from paceline.data.order import SampleOrder
from paceline.data.prefetch import Check
from paceline.data.randomness import Int64, uniform
from paceline.data.sample_reader import SampleReader
from paceline.data.settings import DataSettings
from paceline.data.sources.source import Source


class DeviceReader:
    """Used by many threads at once. ConfigError for what the GPU's way cannot do."""

    def __init__(
        self,
        source: Source,
        transform: SquareTransform,
        settings: DataSettings,
        device: torch.device,
        log: CorruptLog,
        clock: CauseClock,
    ) -> None:
        check_settings(settings)
        _check_source(source, settings)
        self._source = source
        self._draws = transform.draws
        self._decoder = create_batch_decoder(settings.decoder, device)
        self._workers = settings.workers
        cutout = settings.cutout if transform.draws else 0
        check_crop_kernel(
            settings.decoder, device, size=transform.size, hole=cutout,
            interleaved=self._decoder.interleaved,
        )  # fmt: skip
        self._crops = DeviceCrops(source, transform, self._decoder, device, cutout, clock)
        prepare = create_preparer(source, transform, replace(settings, decoder="auto"))
        self._host = SampleReader(source, prepare, log, clock)

    def fill_stream(
        self,
        order: SampleOrder,
        start: int,
        labels: Int64,
        parts: list[torch.Tensor | None],
        place: int,
        check: Check,
    ) -> list[CorruptSample]:
        """Positions from `start` on, as many as there are labels, into `parts[place]`."""
        epochs, indices = order.at(start, start + len(labels))
        rows = uniform(order.seed, epochs, indices, self._draws).tolist()
        labels[...] = self._source.labels[indices]
        met: list[CorruptSample] = []

        def on_host(row: int, square: Pixels) -> None:
            here = slice(row, row + 1)
            met.extend(
                self._host.fill_stream(order, start + row, square[None], labels[here], check)
            )

        parts[place] = self._crops(indices.tolist(), rows, on_host, check)
        return met

    def fill_indices(
        self,
        indices: Int64,
        labels: Int64,
        parts: list[torch.Tensor | None],
        place: int,
        check: Check,
    ) -> Unfilled:
        """The samples `indices`, into `parts[place]`. Returns the rows left unfilled, and why."""
        labels[...] = self._source.labels[indices]
        unfilled: Unfilled = []

        def on_host(row: int, square: Pixels) -> None:
            here = slice(row, row + 1)
            found = self._host.fill_indices(indices[here], square[None], labels[here], check)
            unfilled.extend((row, sample) for _, sample in found)

        rows: list[tuple[float, ...]] = [()] * len(indices)
        parts[place] = self._crops(indices.tolist(), rows, on_host, check)
        return unfilled

    def describe(self, remark: str = "") -> str:
        """`remark` goes with it."""
        threads = f"{self._workers} thread{'' if self._workers == 1 else 's'}"
        text = f"{self._decoder.describe()}, {threads}"
        known = "; ".join(filter(None, (remark, few_connections())))
        return f"{text} ({known})" if known else text

    def remark(self) -> str:
        """How many samples the GPU's decoder did not decode, and why; empty where it decoded all."""
        return self._crops.host_share.remark()


def check_settings(settings: DataSettings) -> None:
    """What the kernel does not know is refused, not done in another way."""
    for name, value, known in (
        ("channels", settings.channels, 3),
        ("interpolation", settings.interpolation, "bilinear"),
        ("augment", settings.augment, "random_resized_crop"),
    ):
        if value != known:
            raise ConfigError(
                f"data.{name}", value, f"data.decoder = {settings.decoder!r} has only {known!r}",
                "set data.decoder = 'auto'",
            )  # fmt: skip
    if extra_draws(settings):
        raise ConfigError(
            "data.decoder", settings.decoder, "cannot do data.color_jitter or data.randaugment",
            "set data.decoder = 'auto', or leave these at 0",
        )  # fmt: skip


def _check_source(source: Source, settings: DataSettings) -> None:
    """Pixels need no decoder: all of them would go through the host, one by one."""
    if len(source) and not isinstance(source.read(0), bytes):
        raise ConfigError(
            "data.decoder", settings.decoder, "decodes JPEGs, but these images are stored as pixels",
            "set data.decoder = 'auto'",
        )  # fmt: skip
