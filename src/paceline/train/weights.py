"""Weights in fp32: for checkpoints, export files and comparisons, and their averages over steps.

The model can compute in half precision while the optimizer holds fp32 masters. Checkpoints, export and
comparisons use the masters. `WeightAverage` is a running average of the weights for evaluation and
export.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager as Context
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import CheckpointError, ConfigError
from paceline.optim.base import MasterOptimizer
from paceline.train.batch_norm import BatchNormState, as_rows, pool
from paceline.train.checkpoint import Checkpoint, write_atomically
from paceline.train.machine import explain_out_of_memory


def master_weights(
    model: nn.Module, optimizer: MasterOptimizer, weights: Sequence[Tensor] | None = None
) -> dict[str, Tensor]:
    """Returns the fp32 weights by parameter name.

    Args:
        model: The model.
        optimizer: The optimizer, which holds the masters.
        weights: Values to return instead of the masters, in the optimizer's order.

    Returns:
        The masters of the trained parameters, and the frozen parameters unchanged.
    """
    chosen = optimizer.masters() if weights is None else weights
    masters = {id(p): m for p, m in zip(optimizer.parameters(), chosen, strict=True)}
    return {name: masters.get(id(p), p).detach() for name, p in model.named_parameters()}


def full_state(
    model: nn.Module, optimizer: MasterOptimizer, weights: Sequence[Tensor] | None = None
) -> dict[str, Tensor]:
    """Returns the model's state dict in fp32.

    Args:
        model: The model.
        optimizer: The optimizer, which holds the masters.
        weights: Values to return instead of the masters, in the optimizer's order.

    Returns:
        The state dict with masters instead of half-precision parameters.
    """
    chosen = optimizer.masters() if weights is None else weights
    # A parameter shared by two modules has two keys and one master.
    masters = {id(p): m for p, m in zip(optimizer.parameters(), chosen, strict=True)}
    state = model.state_dict(keep_vars=True)
    return {name: _widened(masters.get(id(value), value).detach()) for name, value in state.items()}


def restore_masters(
    model: nn.Module, optimizer: MasterOptimizer, state: Mapping[str, Tensor]
) -> None:
    """Copies a state dict of `full_state` into the masters. The model's own weights do not change."""
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter, master in zip(optimizer.parameters(), optimizer.masters(), strict=True):
        master.detach().copy_(state[names[id(parameter)]])


def _widened(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def write_weights(state: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Writes a safetensors file atomically.

    Args:
        state: The tensors by name. They are written in contiguous (NCHW) memory format.
        path: The file to write.
        metadata: Strings by name for the header of the file.
    """
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    write_atomically(path, save(tensors, metadata={"format": "pt", **metadata}))


@torch.no_grad()
def finish_module(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies weights and buffers from `state` into a user's module and removes the module's gradients.

    Afterwards the module shares no memory with the optimizer or the gradient buffers.
    """
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        value.data = state[name].detach().to(value.device, copy=True)
        value.grad = None


def preprocessing(config: RunConfig, classes: Sequence[str], step: int) -> dict[str, Any]:
    """Returns the parameters that a program needs to use exported weights.

    Args:
        config: The settings of the run.
        classes: Names of the classes.
        step: Number of completed steps of the weights.

    Returns:
        Values by name that turn an image into the model's input and outputs into classes.
    """
    data = config.data
    parameters: dict[str, Any] = {
        "model": config.model.name,
        "step": step,
        "classes": list(classes),
        "image_size": data.image_size,
        "eval_resize": data.eval_resize,
        "interpolation": data.interpolation,
        "channels": data.channels,
        "mean": list(data.mean),
        "std": list(data.std),
    }
    if config.run.loss == "bce":
        parameters["scores"] = "sigmoid"  # one binary decision per class
    if data.eval_flip:
        parameters["eval_flip"] = True
    if config.run.average_epochs:
        parameters["average_epochs"] = config.run.average_epochs
    return parameters


def as_metadata(values: Mapping[str, Any]) -> dict[str, str]:
    """Converts all values to strings. Strings stay unchanged, and all other values become JSON."""
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}


def checkpoint_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Returns the state dict of a checkpoint for evaluation.

    The state dict has the averaged weights, if the run averages weights, and the batch-norm statistics
    averaged over ranks.

    Raises:
        CheckpointError: If the batch-norm statistics do not fit the model.
    """
    saved, average = checkpoint.batch_norm, checkpoint.average
    try:
        state = {**checkpoint.model, **average.get("weights", {})}
        counts = as_rows(saved["tracked"])
        pooled = pool(average.get("rows", saved["rows"]), counts)
        means, variances = (row.split(saved["widths"]) for row in pooled)
        for name, mean, variance, tracked in zip(
            saved["names"], means, variances, counts.amax(0), strict=True
        ):
            state[f"{name}.running_mean"] = mean
            state[f"{name}.running_var"] = variance
            state[f"{name}.num_batches_tracked"] = tracked
        return state
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise CheckpointError(
            f"the checkpoint's batch-norm statistics do not fit its model ({error})",
            "use another checkpoint",
        ) from None


def fingerprint(weights: nn.Module | Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of names and values of all parameters in order.

    Two fingerprints are equal only if the weights are bit-identical.
    """
    named = weights.named_parameters() if isinstance(weights, nn.Module) else weights.items()
    digest = hashlib.sha256()
    for name, parameter in named:
        digest.update(name.encode())
        flat = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(flat.numpy().tobytes())
    return digest.hexdigest()


_REMEDY = "use run.average_epochs=0, or free the device"


class WeightAverage:
    """A running average in fp32 of the weights and batch-norm statistics over the last steps.

    Evaluation and export use the average in place of the current weights; training never does. For the
    first `steps` steps, it is the plain mean, without the initial weights. After that, the influence
    of a step decays exponentially with its age. `weights` has the averaged masters in the optimizer's
    order. `statistics` has the averaged batch-norm statistics of this rank.
    """

    def __init__(
        self, model: nn.Module, optimizer: MasterOptimizer, batch_norm: BatchNormState, steps: float
    ) -> None:
        self.steps = steps
        self._model = model
        self._optimizer = optimizer
        self._batch_norm = batch_norm
        self._parameters = optimizer.parameters()
        self.weights = [m.detach().float().clone() for m in optimizer.masters()]
        self.statistics = batch_norm.kept.clone()
        # Number of steps in the average. It is on the device, because a flag on the device decides
        # whether a step is added.
        self._count = torch.zeros((), dtype=torch.float64, device=self.statistics.device)

    def add(self, discard: Tensor) -> None:
        """Adds the current weights to the average, unless the flag `discard` on the device is set."""
        counts = 1 - discard.double()
        share = (counts * (1 / (self._count + 1)).clamp(min=1 / self.steps)).float()
        current = [*(m.detach().float() for m in self._optimizer.masters()), self._batch_norm.kept]
        average = [*self.weights, self.statistics]
        with explain_out_of_memory("in the update", _REMEDY):
            difference = torch._foreach_sub(current, average)
        torch._foreach_mul_(difference, share)
        torch._foreach_add_(average, difference)
        self._count.add_(counts)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Returns a context in which the model has the averaged weights."""
        with torch.no_grad():
            with explain_out_of_memory(
                "while loading the averaged weights into the model", _REMEDY
            ):
                own = [p.clone() for p in self._parameters]
                statistics = self._batch_norm.kept.clone()
            torch._foreach_copy_(self._parameters, self.weights)
            self._batch_norm.kept.copy_(self.statistics)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, own)
                self._batch_norm.kept.copy_(statistics)

    def full_state(self) -> dict[str, Tensor]:
        """Returns the model's state dict with the averaged weights instead of the current weights."""
        return full_state(self._model, self._optimizer, self.weights)

    def capture(self, group: Group, *, average: bool = False) -> dict[str, Any]:
        """Returns the state for a checkpoint on rank 0, {} on all other ranks. All ranks call this.

        `average` has the same meaning as in `gather_rows`.
        """
        rows = self._batch_norm.gather(self.statistics, group, average=average)
        return {} if rows is None else self._captured(rows)

    def capture_alone(self) -> dict[str, Any]:
        """Returns the state for a checkpoint that this rank writes without the other ranks."""
        return self._captured(self.statistics.detach().cpu()[None].clone())

    def _captured(self, rows: Tensor) -> dict[str, Any]:
        names = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        state = self.full_state()
        return {
            "count": float(self._count),
            "weights": {name: state[name] for name in state if name in names},
            "rows": rows,
        }

    def restore(self, saved: dict[str, Any], tracked: Tensor, group: Group) -> None:
        """Restores a captured state. If the state is empty, the average starts anew.

        Args:
            saved: The captured state.
            tracked: Batch counts of the checkpoint, of all ranks.
            group: The ranks.
        """
        if not saved:
            self._count.zero_()
            for place, master in zip(self.weights, self._optimizer.masters(), strict=True):
                place.copy_(master)
            self.statistics.copy_(self._batch_norm.kept)
            return
        names = {id(p): name for name, p in self._model.named_parameters()}
        for place, parameter in zip(self.weights, self._parameters, strict=True):
            place.copy_(saved["weights"][names[id(parameter)]])
        rows = self._batch_norm.own_rows(saved["rows"], as_rows(tracked), group)
        self.statistics.copy_(rows)
        self._count.fill_(saved["count"])

    def describe(self, steps_per_epoch: float) -> str:
        """Describes the averaging of weights, for display at the start of the run."""
        epochs = self.steps / steps_per_epoch
        return f"over about {self.steps:,.0f} steps ({epochs:g} epochs), for evaluation and export"


def create_average(
    epochs: float, steps_per_epoch: float, model: nn.Module, optimizer: MasterOptimizer,
    batch_norm: BatchNormState,
) -> WeightAverage | None:  # fmt: skip
    """Creates the weight average that `run.average_epochs` requests.

    Args:
        epochs: Number of epochs over which to average; 0 turns averaging off.
        steps_per_epoch: Number of steps in an epoch.
        model: The model.
        optimizer: The optimizer, which holds the masters.
        batch_norm: The batch-norm statistics of the model.

    Returns:
        The average, or None if averaging is off.

    Raises:
        ConfigError: If the average would cover fewer than two steps.
    """
    if epochs == 0:
        return None
    steps = epochs * steps_per_epoch
    if steps < 2:
        raise ConfigError(
            "run.average_epochs", epochs,
            f"is less than two steps ({steps_per_epoch:g} in an epoch here)",
            f"use 0 (off), or at least {2 / steps_per_epoch:.3g}",
        )  # fmt: skip
    with explain_out_of_memory("while copying the weights for their average", _REMEDY):
        return WeightAverage(model, optimizer, batch_norm, steps)


def applied(average: WeightAverage | None) -> Context[None]:
    """Returns a context in which the model has the averaged weights, if there is an average."""
    return nullcontext() if average is None else average.applied()
