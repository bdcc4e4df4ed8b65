"""`ImageLoader`: normalized batches on the device, for custom training loops.

`ImageLoader` has the same sample order, augmentation, decoders and prefetching as `paceline train`.
In an epoch, the ranks together read every sample once (except for `drop_last`). All ranks have the
same number of batches, and no batch is empty.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch

from paceline.core.errors import ConfigError, DataError, nearest
from paceline.core.settings import convert
from paceline.data.device.normalize import Normalizer
from paceline.data.image import CorruptSample
from paceline.data.loaders.create import create_eval_loader, create_train_loader
from paceline.data.loaders.loader import EvalLoader, TrainLoader
from paceline.data.order import BatchPlan, Stretch
from paceline.data.prefetch import Closing
from paceline.data.settings import DataSettings
from paceline.data.sources.base import Source, Split, split_source
from paceline.data.sources.opening import as_source

LAYOUTS = ("NCHW", "NHWC")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_STATE = ("epoch", "batch", "seed", "samples", "batch_size", "world_size", "drop_last")


@dataclass(frozen=True)
class EpochPlan(BatchPlan):
    """Divides the samples of one epoch among steps and ranks. No rank has an empty batch.

    The samples that remain after the last full step are divided among all ranks. If fewer samples
    remain than there are ranks, the remaining samples and the last full step are divided into two
    equal steps. If that is impossible (with batches of one sample), the remaining samples join the
    last full step, so the last batch of some ranks has two samples.

    Attributes:
        epoch: Number of the epoch in the sample order, from 0.
        drop_last: Leaves out the samples after the last full step.
    """

    epoch: int = 0
    drop_last: bool = False

    @property
    def _rest(self) -> int:
        return 0 if self.drop_last else self.samples % self.global_batch

    @property
    def _merges(self) -> bool:
        """True if the last full step also takes the remaining samples."""
        too_few = 0 < self._rest < self.world_size <= self.samples
        return too_few and self.global_batch + self._rest < 2 * self.world_size

    @property
    def total_steps(self) -> int:
        full = self.samples // self.global_batch
        return full + (1 if self._rest and not self._merges else 0)

    def micro_batches(self, step: int, rank: int) -> list[Stretch]:
        """Returns a list with the single range of the sample order that `rank` reads in `step`."""
        offset = self.epoch * self.samples
        rest = self._rest
        first, steps, length = step, 1, self.global_batch
        if rest:
            last = self.total_steps - 1
            if self._merges:
                length += rest if step == last else 0
            elif rest < self.world_size and step >= last - 1:
                first, steps, length = max(last - 1, 0), min(2, last + 1), self.global_batch + rest
            elif step == last:
                length = rest
        length = min(length, self.samples - first * self.global_batch)
        start = offset + first * self.global_batch
        pieces = steps * self.world_size
        piece = (step - first) * self.world_size + rank
        return [(start + piece * length // pieces, start + (piece + 1) * length // pieces)]


class ImageLoader(Closing):
    """Iterates over batches `(images, labels)`: normalized images in NCHW, and int64 labels.

    Each iteration runs from the current position to the end of the epoch, and the next iteration
    starts the next epoch. After a `break` or `load_state_dict`, the next iteration continues after
    the last batch. With `train=False`, each iteration is one pass over the validation images, in
    order and without augmentation.

    Args:
        data: A directory as for `--data-dir`, a `Source`, or a map-style Dataset of (image, label).
        batch_size: Samples per batch of one rank.
        train: True for training batches, False for validation.
        image_size: Edge of the images in pixels.
        channels: 1 for grayscale, 3 for RGB.
        device: Device of the batches. The default is the current GPU, or the CPU without one.
        layout: Memory layout of the images. "NHWC" is `torch.channels_last`.
        dtype: Type of the normalized images.
        seed: Seed of the sample order and the augmentation.
        rank: Rank of this process. The default is the rank in torch.distributed.
        world_size: Number of ranks. The default is the number of ranks in torch.distributed.
        workers: Number of threads that decode and augment.
        mean: Mean for normalization, on the scale 0 to 1. The default is ImageNet's.
        std: Standard deviation for normalization, on the scale 0 to 1. The default is ImageNet's.
        drop_last: Leaves out the samples after the last full batch of an epoch.
        augment: A function that augments one training image (see docs/data.md).
        classes: Names of the classes, for a Dataset without names.
        settings: Other settings of `[data]`, for example `{"data.val_split": 0.1}`. The prefix is
            optional.

    Raises:
        ConfigError: If an argument is invalid.
        DataError: If the data cannot be opened, or has fewer samples than ranks.

    Example:
        >>> with ImageLoader("photos", 64, image_size=128, device="cuda") as loader:  # doctest: +SKIP
        ...     for images, labels in loader:
        ...         loss = F.cross_entropy(model(images), labels)
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        *,
        train: bool = True,
        image_size: int = 224,
        channels: int = 3,
        device: torch.device | str | None = None,
        layout: str = "NCHW",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        workers: int = 2,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        drop_last: bool = False,
        augment: Callable[..., Any] | None = None,
        classes: Sequence[str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings = DataSettings(
            **{
                "image_size": image_size, "channels": channels, "workers": workers,
                "mean": tuple(mean), "std": tuple(std), **_data_settings(settings or {}),
            }
        )  # fmt: skip
        self.rank, self.world_size = _place(rank, world_size)
        self.train, self.batch_size, self.seed, self.drop_last = train, batch_size, seed, drop_last
        self.device = _device(device)
        _check("batch_size", batch_size, batch_size >= 1, "give 1 or more")
        _check("layout", layout, layout in LAYOUTS, f"use {' or '.join(LAYOUTS)}")
        _check("dtype", dtype, dtype in DTYPES, "use float32, float16 or bfloat16")
        _check("seed", seed, 0 <= seed < 2**63, "give 0 or more")
        self._opened = not isinstance(data, Source)
        split: Split = "train" if train else "val"
        self.source = as_source(data, split, classes, self.settings)
        if self.settings.val_split and not isinstance(data, str | os.PathLike):
            self.source = split_source(self.source, self.settings.val_split, split)
        self._augment = augment
        self._normalize = Normalizer(
            self.settings.mean, self.settings.std, self.settings.channels, dtype,
            channels_last=layout == "NHWC",
        )  # fmt: skip
        self._epoch = self._batch = 0
        self._described = ""
        self._running: TrainLoader | None = None
        self._evaluation: EvalLoader | None = None
        self._corrupt: dict[int, CorruptSample] = {}
        too_few = len(self.source) < self.world_size
        if train and (too_few or len(self) < 1):
            raise DataError(
                f"{self.source.kind}: {len(self.source)} images are too few for {self.world_size} ranks "
                f"with batches of {batch_size}{' and drop_last' if drop_last else ''}",
                "use fewer ranks" if too_few else "use smaller batches or fewer ranks",
            )

    @property
    def classes(self) -> Sequence[str]:
        return self.source.classes

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._epoch

    @property
    def corrupt(self) -> tuple[CorruptSample, ...]:
        """The corrupt samples found so far. They are replaced in training and left out in validation."""
        return tuple(self._corrupt.values())

    def describe(self) -> str:
        """Describes how batches are made, for example by which decoder. Use after the first batch."""
        return self._described

    def __len__(self) -> int:
        """Returns the number of batches per epoch of this rank."""
        if self.train:
            return self._plan().total_steps
        return -(-len(range(self.rank, len(self.source), self.world_size)) // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration start epoch `epoch`. Does nothing if that is the current epoch."""
        if epoch != self._epoch:
            self._epoch, self._batch = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Returns the position after the last batch, for `load_state_dict`."""
        epoch, batch = self._epoch, self._batch
        if self.train and batch == len(self):
            epoch, batch = epoch + 1, 0
        return {
            "epoch": epoch, "batch": batch if self.train else 0, "seed": self.seed,
            "samples": len(self.source), "batch_size": self.batch_size,
            "world_size": self.world_size, "drop_last": int(self.drop_last),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues at a position that `state_dict` returned.

        Raises:
            ConfigError: If data, seed or batch sizes differ from the loader that saved the state.
        """
        here = self.state_dict()
        for name in _STATE:
            if name not in state:
                raise ConfigError(f"ImageLoader: {name}", None, "is missing in the state")
            if name not in ("epoch", "batch") and state[name] != here[name]:
                raise ConfigError(
                    f"ImageLoader: {name}", here[name], f"the saved state has {state[name]}",
                    "continue with the arguments and data of the loader that was saved",
                )  # fmt: skip
        self._stop()
        self._epoch, self._batch = state["epoch"], state["batch"]

    def _plan(self) -> EpochPlan:
        return EpochPlan(
            samples=len(self.source), epochs=self._epoch + 1,
            global_batch=self.batch_size * self.world_size, micro_batch=self.batch_size,
            world_size=self.world_size, epoch=self._epoch, drop_last=self.drop_last,
        )  # fmt: skip

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self._training() if self.train else self._pass()

    def _training(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self._stop()
        if self._batch >= len(self):
            self._epoch, self._batch = self._epoch + 1, 0
        loader = self._running = create_train_loader(
            self.source, self._plan(), self.settings, seed=self.seed, rank=self.rank,
            first_step=self._batch, device=self.device, augment=self._augment,
        )  # fmt: skip
        self._described = loader.describe()
        try:
            for batch in loader:
                # Before the yield, so that a state saved in the loop's body includes this batch.
                self._batch += 1
                self._corrupt.update((sample.index, sample) for sample in batch.corrupt)
                yield self._on_device(batch.images, batch.labels)
            if loader is self._running:
                self._epoch, self._batch = self._epoch + 1, 0
        finally:
            loader.close()

    def _pass(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if self._evaluation is None:
            self._evaluation = create_eval_loader(
                self.source, self.settings, rank=self.rank, world_size=self.world_size,
                batch_size=self.batch_size, device=self.device,
            )  # fmt: skip
            self._described = self._evaluation.describe()
        for batch in self._evaluation:
            yield self._on_device(batch.images, batch.labels)
        self._corrupt = {sample.index: sample for sample in self._evaluation.corrupt}
        self._epoch += 1

    def _on_device(
        self, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        labels = labels.to(self.device, non_blocking=True)
        return self._normalize(images, self.device), labels

    def _stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def close(self) -> None:
        """Stops the threads, and closes the source if the loader opened it."""
        self._stop()
        if self._evaluation is not None:
            self._evaluation.close()
        if self._opened:
            self.source.close()


def _check(name: str, value: object, valid: bool, remedy: str) -> None:
    if not valid:
        raise ConfigError(f"ImageLoader: {name}", value, "is invalid", remedy)


def _data_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Removes the prefix `data.` from the keys. Raises ConfigError for unknown settings."""
    hints = get_type_hints(DataSettings)
    values = {}
    for key, value in given.items():
        name = key.removeprefix("data.")
        if name not in hints:
            setting = name if "." in name else f"data.{name}"
            raise ConfigError(setting, None, "is not a setting of [data]", nearest(name, hints))
        values[name] = convert(value, hints[name], f"data.{name}")
    return values


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Returns rank and number of ranks. The defaults are those of torch.distributed."""
    if rank is None and world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1
    rank, world_size = rank or 0, world_size or 1
    if not 0 <= rank < world_size:
        raise ConfigError(
            "ImageLoader: rank",
            rank,
            f"is not a rank below {world_size}",
            "give both rank and world_size",
        )
    return rank, world_size


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if chosen == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return chosen
