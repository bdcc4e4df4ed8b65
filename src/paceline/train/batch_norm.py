"""Running statistics of batch norm.

In: a model. Its running means and variances move into one flat buffer, each rank's own. Out:
remembering them around a step that may be skipped; their average over ranks, for
evaluation and export; their rows for the checkpoint.

The average over N ranks treats their statistics as those of N equal parts of one population: the mean
of the means, and the mean of the variances plus the variance of the means.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.comm.group import Group


class BatchNormState:
    """Row 0 holds all running means, row 1 all running variances, layer after layer."""

    def __init__(self, model: nn.Module) -> None:
        layers = [
            (name, layer)
            for name, layer in model.named_modules()
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None
        ]
        self.names = [name for name, _ in layers]
        self.widths = [layer.num_features for _, layer in layers]
        # Also where there is no such layer: a step joins these with flags on the model's device.
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
            # By `.data` each view counts its own changes. Autograd would else take the update of one
            # layer, where torch.compile makes it visible, for one of what another has saved.
            layer.running_mean, layer.running_var = (
                self.flat[0, start:stop].data,
                self.flat[1, start:stop].data,
            )
            layer.num_batches_tracked = self.tracked[number]
            start = stop
        self._flat_before, self._tracked_before = self.flat.clone(), self.tracked.clone()

    def remember(self) -> None:
        """Before a step, which a skip or a stop may undo."""
        self._flat_before.copy_(self.flat)
        self._tracked_before.copy_(self.tracked)

    def roll_back(self) -> None:
        """Back to what `remember` saw."""
        self.flat.copy_(self._flat_before)
        self.tracked.copy_(self._tracked_before)

    def settle(self, discard: Tensor) -> None:
        """Back to what `remember` saw where the flag on the device says so: a NaN in one batch must not
        live on in the statistics. Nobody waits to read the flag."""
        self.flat.copy_(torch.where(discard > 0, self._flat_before, self.flat))
        self.tracked.copy_(torch.where(discard > 0, self._tracked_before, self.tracked))

    def average(self, group: Group) -> Tensor:
        """The average over ranks, computed alike on all of them, in float64 inside."""
        mean, variance = self.flat.double()
        sums = torch.stack([mean, variance, mean * mean])
        group.all_reduce_sum(sums)
        return _pooled(sums / group.world_size).to(self.flat.dtype)

    @contextmanager
    def averaged(self, group: Group) -> Iterator[None]:
        """Within this context the model holds the average; afterwards this rank's own again."""
        own = self.flat.clone()
        self.flat.copy_(self.average(group))
        try:
            yield
        finally:
            self.flat.copy_(own)

    def rows(self, group: Group) -> Tensor | None:
        """Every rank's statistics, [ranks, 2, width], on rank 0."""
        return group.gather(self.flat)

    def restore(self, rows: Tensor, tracked: Tensor, group: Group) -> None:
        """As `own_row` says."""
        self.flat.copy_(own_row(rows, group))
        self.tracked.copy_(tracked.to(self.tracked.device))


def own_row(rows: Tensor, group: Group) -> Tensor:
    """This rank's row; on another number of ranks than saved, the average on all."""
    return rows[group.rank] if rows.shape[0] == group.world_size else pool(rows)


def pool(rows: Tensor) -> Tensor:
    """The average of `[ranks, 2, width]` as `[2, width]`."""
    mean, variance = rows.double().unbind(1)
    sums = torch.stack([mean.mean(0), variance.mean(0), (mean * mean).mean(0)])
    return _pooled(sums).to(rows.dtype)


def _pooled(averages: Tensor) -> Tensor:
    mean, variance, square = averages
    return torch.stack([mean, variance + (square - mean * mean).clamp_(min=0)])
