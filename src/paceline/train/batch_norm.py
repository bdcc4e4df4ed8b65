"""Running statistics of batch norm: of each rank, and their average over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.comm.group import Group


class BatchNormState:
    """Running statistics of batch norm, each rank's own, in one flat buffer: row 0 of `flat` holds all
    running means, row 1 all variances.

    The average over N ranks treats their statistics as those of N equal parts of one population: the
    mean of the means, and the mean of the variances plus the variance of the means.

    `kept` and `kept_tracked` are what a step may change, a checkpoint has and the layers use. A subclass
    may keep several rows.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [
            (name, layer)
            for name, layer in model.named_modules()
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None
        ]
        self.names = [name for name, _ in layers]
        self.widths = [layer.num_features for _, layer in layers]
        # Also without any such layer: a step combines these with flags on the model's device.
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.flat = torch.zeros(2, sum(self.widths), device=device)
        self.tracked = torch.zeros(len(layers), dtype=torch.int64, device=device)
        start = 0
        for number, (_, layer) in enumerate(layers):
            stop = start + layer.num_features
            assert layer.running_mean is not None
            assert layer.running_var is not None
            self.flat[0, start:stop] = layer.running_mean
            self.flat[1, start:stop] = layer.running_var
            # `.data` gives each view its own version counter. Otherwise autograd would take the
            # update of one layer, which torch.compile makes visible, for a change of what another
            # layer saved.
            layer.running_mean, layer.running_var = (
                self.flat[0, start:stop].data,
                self.flat[1, start:stop].data,
            )
            if layer.num_batches_tracked is not None:  # of pretrained weights
                self.tracked[number] = layer.num_batches_tracked
            layer.num_batches_tracked = self.tracked[number]
            start = stop
        self.keep(self.flat, self.tracked)

    def keep(self, flat: Tensor, tracked: Tensor) -> None:
        """Makes these what lasts from step to step."""
        self.kept, self.kept_tracked = flat, tracked
        self._flat_before, self._tracked_before = flat.clone(), tracked.clone()

    @property
    def saved_tracked(self) -> Tensor:
        """Batches that each layer has seen, on rank 0."""
        return self.kept_tracked

    def keys(self) -> frozenset[str]:
        """The keys of the statistics in the model's state dict."""
        parts = ("running_mean", "running_var", "num_batches_tracked")
        return frozenset(
            f"{name}.{part}" if name else part for name in self.names for part in parts
        )

    def remember(self) -> None:
        """Keeps the statistics before a step that may be skipped or stopped."""
        self._flat_before.copy_(self.kept)
        self._tracked_before.copy_(self.kept_tracked)

    def roll_back(self) -> None:
        """Restores what `remember` kept."""
        self.kept.copy_(self._flat_before)
        self.kept_tracked.copy_(self._tracked_before)

    def discard_if(self, flag: Tensor) -> None:
        """Restores what `remember` kept if the flag on the device is set, so that a NaN in one batch
        does not stay in the statistics. Does not synchronize with the device."""
        self.kept.copy_(torch.where(flag > 0, self._flat_before, self.kept))
        self.kept_tracked.copy_(torch.where(flag > 0, self._tracked_before, self.kept_tracked))

    def average(self, group: Group) -> Tensor:
        """The average over ranks, bit-identical on all of them."""
        return average_over_ranks(self.flat, group)

    @contextmanager
    def averaged(self, group: Group) -> Iterator[None]:
        """Inside the context the model holds the average over ranks."""
        own = self.flat.clone()
        self.flat.copy_(self.average(group))
        try:
            yield
        finally:
            self.flat.copy_(own)

    def rows(self, group: Group, *, average: bool = False) -> Tensor | None:
        """The statistics of all ranks, [ranks, 2, width], on rank 0; see `gather_rows`."""
        return self.gather(self.kept, group, average=average)

    def gather(self, kept: Tensor, group: Group, *, average: bool = False) -> Tensor | None:
        """What every rank holds in the form of `kept`, on rank 0; see `gather_rows`."""
        return gather_rows(kept, group, average=average)

    def restore(self, rows: Tensor, tracked: Tensor, group: Group) -> None:
        self.kept.copy_(self.own_rows(rows, group))
        self.kept_tracked.copy_(tracked.to(self.tracked.device))

    def own_rows(self, rows: Tensor, group: Group) -> Tensor:
        """Of `[ranks, 2, width]`, this rank's row; the average if the number of ranks has changed."""
        return rows[group.rank] if rows.shape[0] == group.world_size else pool(rows)


def gather_rows(flat: Tensor, group: Group, *, average: bool) -> Tensor | None:
    """Each rank's statistics on rank 0, None elsewhere. With `average` a single row of their average,
    which every rank goes on with, as a run does that is resumed from it."""
    if not average:
        return group.gather(flat)
    flat.copy_(average_over_ranks(flat, group))
    return flat.detach().cpu()[None].clone() if group.rank == 0 else None


def average_over_ranks(flat: Tensor, group: Group) -> Tensor:
    """Of [2, width], in float64."""
    mean, variance = flat.double()
    sums = torch.stack([mean, variance, mean * mean])
    group.all_reduce_sum(sums)
    return _pooled(sums / group.world_size).to(flat.dtype)


def pool(rows: Tensor) -> Tensor:
    """The average of `[ranks, 2, width]` as `[2, width]`."""
    mean, variance = rows.double().unbind(1)
    sums = torch.stack([mean.mean(0), variance.mean(0), (mean * mean).mean(0)])
    return _pooled(sums).to(rows.dtype)


def _pooled(averages: Tensor) -> Tensor:
    mean, variance, square = averages
    return torch.stack([mean, variance + (square - mean * mean).clamp_(min=0)])
