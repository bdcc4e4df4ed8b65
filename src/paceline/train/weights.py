"""`WeightAverage`: the weights of the last steps, averaged.

In: masters and batch-norm statistics as they are after each step. Out: their running average in fp32,
which evaluation, export and whoever reads a checkpoint's weights take in place of the last step's;
training itself never sees it. Until as many steps are done as it reaches back it is their plain mean, so
nothing of the initial weights is in it; from then on a step's weight decays exponentially with its age.

Weights swing about a better point than any that they pass, and the average lies nearer to it. How far it
reaches back is told in epochs, which means the same at every batch size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager as Context
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.core.errors import CheckpointError, ConfigError
from paceline.optim.lars import LARS
from paceline.train.batch_norm import BatchNormState, own_row, pool
from paceline.train.checkpoint import Checkpoint, write_atomically
from paceline.train.machine import memory_told

_REMEDY = "use run.average_epochs=0, or free the device"


class WeightAverage:
    """`weights` are in the optimizer's order, `statistics` this rank's own."""

    def __init__(
        self, model: nn.Module, optimizer: LARS, batch_norm: BatchNormState, steps: float
    ) -> None:
        """`steps`: how many it reaches back."""
        self.steps = steps
        self._model = model
        self._optimizer = optimizer
        self._batch_norm = batch_norm
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.weights = [m.detach().float().clone() for m in optimizer.masters()]
        self.statistics = batch_norm.flat.clone()
        # How many steps are in it. On the device, where it is decided whether one counts.
        self._count = torch.zeros((), dtype=torch.float64, device=self.statistics.device)

    def add(self, discard: Tensor) -> None:
        """One more step, unless the flag on the device says that nothing of it remains."""
        counts = 1 - discard.double()
        share = (counts * (1 / (self._count + 1)).clamp(min=1 / self.steps)).float()
        now = [m.detach().float() for m in self._optimizer.masters()]
        places = [*self.weights, self.statistics]
        apart = torch._foreach_sub([*now, self._batch_norm.flat], places)
        torch._foreach_mul_(apart, share)
        torch._foreach_add_(places, apart)
        self._count.add_(counts)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within this context the model computes with the average; afterwards with its own again."""
        with torch.no_grad():
            with memory_told("while putting the averaged weights in place", _REMEDY):
                own = [p.clone() for p in self._parameters]
                statistics = self._batch_norm.flat.clone()
            torch._foreach_copy_(self._parameters, self.weights)
            self._batch_norm.flat.copy_(self.statistics)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, own)
                self._batch_norm.flat.copy_(statistics)

    def full_state(self) -> dict[str, Tensor]:
        """The model's state dict with the average in place of its weights, for export and checkpoint."""
        return full_state(self._model, self._optimizer, self.weights)

    def named(self) -> dict[str, Tensor]:
        """Each parameter's average by name, as `master_weights` names the masters."""
        return master_weights(self._model, self._optimizer, self.weights)

    def capture(self, group: Group) -> dict[str, Any]:
        """For a checkpoint, on rank 0; all ranks call."""
        rows = group.gather(self.statistics)
        return {} if rows is None else self._captured(rows)

    def capture_alone(self) -> dict[str, Any]:
        """For a checkpoint of this rank alone: its own statistics."""
        return self._captured(self.statistics.detach().cpu()[None].clone())

    def _captured(self, rows: Tensor) -> dict[str, Any]:
        names = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        state = self.full_state()
        return {
            "count": float(self._count),
            "weights": {name: state[name].cpu() for name in state if name in names},
            "rows": rows,
        }

    def restore(self, saved: dict[str, Any], group: Group) -> None:
        """As captured. From a run that kept none it begins with the weights that are there."""
        if not saved:
            self._count.zero_()
            for place, master in zip(self.weights, self._optimizer.masters(), strict=True):
                place.copy_(master)
            self.statistics.copy_(self._batch_norm.flat)
            return
        names = {id(p): name for name, p in self._model.named_parameters()}
        for place, parameter in zip(self.weights, self._parameters, strict=True):
            place.copy_(saved["weights"][names[id(parameter)]])
        self.statistics.copy_(own_row(saved["rows"], group))
        self._count.fill_(saved["count"])

    def describe(self, steps_per_epoch: float) -> str:
        epochs = self.steps / steps_per_epoch
        return f"over about {self.steps:,.0f} steps ({epochs:g} epochs), for evaluation and export"


def create_average(
    epochs: float, steps_per_epoch: float, model: nn.Module, optimizer: LARS,
    batch_norm: BatchNormState,
) -> WeightAverage | None:  # fmt: skip
    """None where `run.average_epochs` is 0."""
    if epochs == 0:
        return None
    steps = epochs * steps_per_epoch
    if steps < 2:
        raise ConfigError(
            "run.average_epochs", epochs,
            f"is less than two steps ({steps_per_epoch:g} in an epoch here)",
            f"use 0 (off), or at least {2 / steps_per_epoch:.3g}",
        )  # fmt: skip
    with memory_told("while copying the weights for their average", _REMEDY):
        return WeightAverage(model, optimizer, batch_norm, steps)


def applied(average: WeightAverage | None) -> Context[None]:
    """Where there is no average the model stays as it is."""
    return nullcontext() if average is None else average.applied()


# The weights of a run in full precision.
#
# In: the model, which computes in half precision, and the optimizer, which holds the fp32
# masters. Out: one state dict of fp32 weights, for checkpoints, export and comparison; and the
# other way round.


def master_weights(
    model: nn.Module, optimizer: LARS, weights: Sequence[Tensor] | None = None
) -> dict[str, Tensor]:
    """Each parameter's master, or what is in its place in `weights`, by name; a frozen parameter has none
    and is taken as it is."""
    chosen = optimizer.masters() if weights is None else weights
    masters = {id(p): m for p, m in zip(_parameters(optimizer), chosen, strict=True)}
    return {name: masters.get(id(p), p).detach() for name, p in model.named_parameters()}


def full_state(
    model: nn.Module, optimizer: LARS, weights: Sequence[Tensor] | None = None
) -> dict[str, Tensor]:
    """The model's state dict with masters, or `weights` in their order, in place of its parameters."""
    chosen = optimizer.masters() if weights is None else weights
    # A parameter shared by two modules has two keys and one master.
    masters = {id(p): m for p, m in zip(_parameters(optimizer), chosen, strict=True)}
    state = model.state_dict(keep_vars=True)
    return {name: _widened(masters.get(id(value), value).detach()) for name, value in state.items()}


def restore_masters(model: nn.Module, optimizer: LARS, state: Mapping[str, Tensor]) -> None:
    """Fills the masters from a state dict of `full_state`; the model has its weights already."""
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter, master in zip(_parameters(optimizer), optimizer.masters(), strict=True):
        master.detach().copy_(state[names[id(parameter)]])


def _parameters(optimizer: LARS) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _widened(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


# Weights for other programs.
#
# In: a model's state dict with averaged batch-norm statistics. Out: a safetensors file with
# torchvision's keys, and a fingerprint by which ranks and runs compare their weights bit by bit.


def write_weights(state: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Atomically, each tensor contiguous in torchvision's (NCHW) order."""
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    write_atomically(path, save(tensors, metadata={"format": "pt", **metadata}))


def checkpoint_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The state dict of a checkpoint, of its `WeightAverage` where it has one; batch-norm statistics
    averaged over the ranks. CheckpointError where its parts do not fit each other."""
    try:
        return _pooled_weights(checkpoint)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise CheckpointError(
            f"the checkpoint's batch-norm statistics do not fit its model ({error})",
            "use another checkpoint",
        ) from None


def _pooled_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    average = checkpoint.average
    state = {**checkpoint.model, **average.get("weights", {})}
    pooled = pool(average.get("rows", checkpoint.batch_norm["rows"]))
    start = 0
    for name, width, tracked in zip(
        checkpoint.batch_norm["names"],
        checkpoint.batch_norm["widths"],
        checkpoint.batch_norm["tracked"],
        strict=True,
    ):
        state[f"{name}.running_mean"] = pooled[0, start : start + width]
        state[f"{name}.running_var"] = pooled[1, start : start + width]
        state[f"{name}.num_batches_tracked"] = tracked
        start += width
    return state


def fingerprint(weights: nn.Module | Mapping[str, Tensor]) -> str:
    """SHA-256 over all parameters, in order. Equal iff the weights are bit-identical."""
    named = weights.named_parameters() if isinstance(weights, nn.Module) else weights.items()
    digest = hashlib.sha256()
    for name, parameter in named:
        digest.update(name.encode())
        flat = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(flat.numpy().tobytes())
    return digest.hexdigest()
