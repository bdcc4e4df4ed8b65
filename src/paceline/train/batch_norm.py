"""Holds the running statistics of batch norm of this rank, and averages them over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.comm.group import Group


class BatchNormState:
    """The running statistics of this rank in one flat buffer.

    The average over ranks treats each rank's images as a part of a population, in proportion to the
    number of batches that the rank has processed. The average mean is the mean of the means; the average
    variance is the mean of the variances plus the variance of the means.

    Attributes:
        flat: Running means (row 0) and running variances (row 1) of all layers, one after the other. The
            buffers of the layers are views of this tensor.
        tracked: Number of batches that each layer has processed.
        kept: The statistics that a step may change and that a checkpoint contains. This is `flat`; a
            subclass can use a tensor with statistics of several ranks.
        kept_tracked: The batch counts that belong to `kept`.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [
            (name, layer)
            for name, layer in model.named_modules()
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None
        ]
        self.names = [name for name, _ in layers]
        self.widths = [layer.num_features for _, layer in layers]
        # Needed even without batch norm: a step combines `flat` with flags on the model's device.
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
            # `.data` gives each view its own version counter. Otherwise autograd would report the
            # update of one layer, which torch.compile makes visible, as a change of a tensor that
            # another layer saved.
            layer.running_mean, layer.running_var = (
                self.flat[0, start:stop].data,
                self.flat[1, start:stop].data,
            )
            if layer.num_batches_tracked is not None:  # pretrained weights have a count above 0
                self.tracked[number] = layer.num_batches_tracked
            layer.num_batches_tracked = self.tracked[number]
            start = stop
        self.keep(self.flat, self.tracked)

    def keep(self, flat: Tensor, tracked: Tensor) -> None:
        """Sets the tensors that `kept` and `kept_tracked` refer to."""
        self.kept, self.kept_tracked = flat, tracked
        self._flat_before, self._tracked_before = flat.clone(), tracked.clone()

    def keys(self) -> frozenset[str]:
        """Returns the keys of the statistics in the model's state dict."""
        parts = ("running_mean", "running_var", "num_batches_tracked")
        return frozenset(
            f"{name}.{part}" if name else part for name in self.names for part in parts
        )

    def remember(self) -> None:
        """Copies the statistics before a step that may be skipped or stopped."""
        self._flat_before.copy_(self.kept)
        self._tracked_before.copy_(self.kept_tracked)

    def roll_back(self) -> None:
        """Restores the copies made by `remember`."""
        self.kept.copy_(self._flat_before)
        self.kept_tracked.copy_(self._tracked_before)

    def discard_if(self, flag: Tensor) -> None:
        """Restores the copies made by `remember` if the flag on the device is set.

        A NaN in one batch thus does not stay in the statistics. The host does not wait for the device.
        """
        self.kept.copy_(torch.where(flag > 0, self._flat_before, self.kept))
        self.kept_tracked.copy_(torch.where(flag > 0, self._tracked_before, self.kept_tracked))

    def average(self, group: Group) -> Tensor:
        """Returns the statistics averaged over ranks, which are bit-identical on all ranks."""
        return average_over_ranks(self.flat, self.tracked, group)

    @contextmanager
    def averaged(self, group: Group) -> Iterator[None]:
        """Returns a context in which the model uses the statistics averaged over ranks."""
        own = self.flat.clone()
        self.flat.copy_(self.average(group))
        try:
            yield
        finally:
            self.flat.copy_(own)

    def rows(self, group: Group, *, average: bool = False) -> Tensor | None:
        """Gathers `kept` of all ranks on rank 0; see the function `gather_rows`."""
        return self.gather(self.kept, group, average=average)

    def gather(self, kept: Tensor, group: Group, *, average: bool = False) -> Tensor | None:
        """Gathers a tensor like `kept` from all ranks on rank 0; see the function `gather_rows`."""
        return gather_rows(kept, self.tracked, group, average=average)

    def gather_tracked(self, group: Group, *, average: bool = False) -> Tensor | None:
        """Gathers all ranks' batch counts on rank 0, of shape [ranks, layers]; None on other ranks.

        `average` is True if the statistics were averaged: all ranks then get the largest counts.
        """
        if not average:
            return group.gather(self.tracked)
        self.tracked.copy_(_counts(self.tracked, group).amax(0))
        return self.tracked.detach().cpu()[None].clone() if group.rank == 0 else None

    def restore(self, rows: Tensor, tracked: Tensor, group: Group) -> None:
        """Restores this rank's statistics from the `rows` and the batch counts of a checkpoint."""
        tracked = as_rows(tracked)
        self.kept.copy_(self.own_rows(rows, tracked, group))
        self.kept_tracked.copy_(self.own_tracked(tracked, group))

    def own_rows(self, rows: Tensor, tracked: Tensor, group: Group) -> Tensor:
        """Returns this rank's statistics from the checkpoint's `rows`, of shape [ranks, 2, width].

        Returns the average over `rows` if the number of ranks has changed.
        """
        return rows[group.rank] if rows.shape[0] == group.world_size else pool(rows, tracked)

    def own_tracked(self, tracked: Tensor, group: Group) -> Tensor:
        """Returns this rank's batch counts from the checkpoint's `tracked`, of shape [ranks, layers]."""
        return tracked[group.rank] if len(tracked) == group.world_size else tracked.amax(0)


def gather_rows(flat: Tensor, tracked: Tensor, group: Group, *, average: bool) -> Tensor | None:
    """Gathers the batch-norm statistics of all ranks on rank 0.

    Args:
        flat: Statistics of this rank, of shape [2, width].
        tracked: Number of batches that each layer has processed on this rank.
        group: The ranks.
        average: True to replace `flat` on all ranks by the average over ranks, so that training continues
            with the same values as a resumed run.

    Returns:
        On rank 0, the statistics of all ranks, of shape [ranks, 2, width], or of shape [1, 2, width] if
        they were averaged. None on all other ranks.
    """
    if not average:
        return group.gather(flat)
    flat.copy_(average_over_ranks(flat, tracked, group))
    return flat.detach().cpu()[None].clone() if group.rank == 0 else None


def average_over_ranks(flat: Tensor, tracked: Tensor, group: Group) -> Tensor:
    """Averages statistics of shape [2, width] over ranks, in float64.

    Args:
        flat: Statistics of this rank.
        tracked: Number of batches that each layer has processed on this rank, which is the weight of
            the rank in the average.
        group: The ranks.
    """
    weights = _weights(_counts(tracked, group))
    mean, variance = flat.double()
    sums = torch.stack([mean, variance, mean * mean]) * weights[group.rank]
    group.all_reduce_sum(sums)
    return _pooled(sums / weights.sum()).to(flat.dtype)


def pool(rows: Tensor, tracked: Tensor | None = None) -> Tensor:
    """Averages statistics of shape [ranks, 2, width] over ranks.

    Args:
        rows: The statistics of all ranks.
        tracked: Number of batches by rank and layer, the weights of the ranks in the average. If it is
            None, or belongs to another number of ranks, all weights are equal.
    """
    if tracked is None or len(tracked) != len(rows):
        tracked = torch.ones(len(rows), 1)
    weights = _weights(tracked)
    mean, variance = rows.double().unbind(1)
    parts = torch.stack([mean, variance, mean * mean], 1) * weights[:, None, None].to(rows.device)
    return _pooled(parts.sum(0) / weights.sum().to(rows.device)).to(rows.dtype)


def as_rows(tracked: Tensor) -> Tensor:
    """Returns batch counts in shape [ranks, layers]; in older checkpoints they have shape [layers]."""
    return tracked if tracked.dim() > 1 else tracked[None]


def _counts(tracked: Tensor, group: Group) -> Tensor:
    """Returns the batch counts of all ranks, of shape [ranks, layers]. All ranks call this."""
    counts = torch.zeros(group.world_size, len(tracked), dtype=torch.int64, device=tracked.device)
    counts[group.rank] = tracked
    group.all_reduce_sum(counts)
    return counts


def _weights(counts: Tensor) -> Tensor:
    """Returns the weight of each rank in averages, at most 1, from its batch counts.

    All weights are 1 if no rank has processed a batch, or if the counts are equal.
    """
    most = torch.cat([counts.double(), torch.zeros(len(counts), 1).to(counts.device)], 1).amax(1)
    return torch.where(most.max() > 0, most / most.max(), 1.0)


def _pooled(averages: Tensor) -> Tensor:
    mean, variance, square = averages
    return torch.stack([mean, variance + (square - mean * mean).clamp_(min=0)])
