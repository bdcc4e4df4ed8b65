"""Weights in full precision: masters, checkpoints, export files, fingerprints, and averages over steps.

The model computes in half precision while the optimizer holds fp32 masters. Checkpoints, export and
comparisons use the masters. `WeightAverage` is a running average of the weights for evaluation and
export; `ScheduleFree` is that of schedule-free training.
"""

from __future__ import annotations

import hashlib
import json
import math
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
from paceline.train.batch_norm import BatchNormState, pool
from paceline.train.checkpoint import Checkpoint, write_atomically
from paceline.train.machine import explain_out_of_memory


def master_weights(
    model: nn.Module, optimizer: MasterOptimizer, weights: Sequence[Tensor] | None = None
) -> dict[str, Tensor]:
    """Returns the fp32 weights by parameter name.

    Args:
        model: The model.
        optimizer: Its optimizer.
        weights: Values that replace the masters, in the optimizer's order.

    Returns:
        Masters of trained parameters; frozen parameters as they are.
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
        optimizer: Its optimizer.
        weights: Values that replace the masters, in the optimizer's order.

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
    """Fills the masters from a state dict of `full_state`. Does not change the model's own weights."""
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter, master in zip(optimizer.parameters(), optimizer.masters(), strict=True):
        master.detach().copy_(state[names[id(parameter)]])


def _widened(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def write_weights(state: Mapping[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Writes a safetensors file atomically.

    Args:
        state: The tensors; written contiguous (NCHW).
        path: The file.
        metadata: Texts for the header of the file.
    """
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    write_atomically(path, save(tensors, metadata={"format": "pt", **metadata}))


@torch.no_grad()
def finish_module(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copies weights and buffers of `state` into a user's module and removes its gradients.

    Afterwards the module shares no memory with optimizer and exchange.
    """
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        value.data = state[name].detach().to(value.device, copy=True)
        value.grad = None


def preprocessing(config: RunConfig, classes: Sequence[str], step: int) -> dict[str, Any]:
    """Returns what programs that use exported weights need to know.

    Args:
        config: The settings of the run.
        classes: Names of the classes.
        step: Step of the weights.

    Returns:
        Parameters that turn an image into the model's input and its scores into classes.
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
    """Returns all values as texts: other values than texts as JSON."""
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}


def checkpoint_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Returns the state dict of a checkpoint for evaluation.

    It has averaged weights, if the checkpoint has any, and batch-norm statistics averaged over ranks.

    Raises:
        CheckpointError: If the statistics do not fit the model.
    """
    saved, average = checkpoint.batch_norm, checkpoint.average
    try:
        state = {**checkpoint.model, **average.get("weights", {})}
        pooled = pool(average.get("rows", saved["rows"]))
        means, variances = (row.split(saved["widths"]) for row in pooled)
        for name, mean, variance, tracked in zip(
            saved["names"], means, variances, saved["tracked"], strict=True
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
    """Returns the SHA-256 of all parameters in order; equal only if the weights are bit-identical."""
    named = weights.named_parameters() if isinstance(weights, nn.Module) else weights.items()
    digest = hashlib.sha256()
    for name, parameter in named:
        digest.update(name.encode())
        flat = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(flat.numpy().tobytes())
    return digest.hexdigest()


_REMEDY = "use run.average_epochs=0, or free the device"


class WeightAverage:
    """Running average in fp32 of masters and batch-norm statistics over the last steps.

    Evaluation and export use it in place of the last step's weights; training never does. It is the
    plain mean, without the initial weights, until `steps` steps are done; after that the weight of a
    step decays exponentially with its age. `weights` are in the optimizer's order, `statistics` are
    this rank's own.
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
        # Number of steps in the average. On the device, because a flag there decides whether a step
        # counts.
        self._count = torch.zeros((), dtype=torch.float64, device=self.statistics.device)

    def set_rate(self, rate: float) -> None:
        """The rate of the next step, which `ScheduleFree` needs."""

    def add(self, discard: Tensor) -> None:
        """Adds the current step, unless the flag on the device is set."""
        counts = 1 - discard.double()
        share = (counts * (1 / (self._count + 1)).clamp(min=1 / self.steps)).float()
        self._approach([m.detach().float() for m in self._optimizer.masters()], share)
        self._count.add_(counts)

    def _approach(self, weights: list[Tensor], share: Tensor) -> None:
        """Moves the average towards `weights` and the current statistics by `share` of the way."""
        places = [*self.weights, self.statistics]
        with explain_out_of_memory("in the update", _REMEDY):
            apart = torch._foreach_sub([*weights, self._batch_norm.kept], places)
        torch._foreach_mul_(apart, share)
        torch._foreach_add_(places, apart)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Gives the model the average inside the context."""
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
        """Returns the model's state dict with the average instead of its weights."""
        return full_state(self._model, self._optimizer, self.weights)

    def capture(self, group: Group, *, average: bool = False) -> dict[str, Any]:
        """Returns the state for the checkpoint, on rank 0. A collective; see `gather_rows`."""
        rows = self._batch_norm.gather(self.statistics, group, average=average)
        return {} if rows is None else self._captured(rows)

    def capture_alone(self) -> dict[str, Any]:
        """Returns the state for a checkpoint of this rank alone."""
        return self._captured(self.statistics.detach().cpu()[None].clone())

    def _captured(self, rows: Tensor) -> dict[str, Any]:
        names = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        state = self.full_state()
        return {
            "count": float(self._count),
            "weights": {name: state[name] for name in state if name in names},
            "rows": rows,
        }

    def restore(self, saved: dict[str, Any], group: Group) -> None:
        """Restores a captured state. If it is empty, the average starts with the current weights."""
        if not saved:
            self._count.zero_()
            for place, master in zip(self.weights, self._optimizer.masters(), strict=True):
                place.copy_(master)
            self.statistics.copy_(self._batch_norm.kept)
            return
        names = {id(p): name for name, p in self._model.named_parameters()}
        for place, parameter in zip(self.weights, self._parameters, strict=True):
            place.copy_(saved["weights"][names[id(parameter)]])
        self.statistics.copy_(self._batch_norm.own_rows(saved["rows"], group))
        self._count.fill_(saved["count"])

    def describe(self, steps_per_epoch: float) -> str:
        """Returns a description for the start of the run."""
        epochs = self.steps / steps_per_epoch
        return f"over about {self.steps:,.0f} steps ({epochs:g} epochs), for evaluation and export"


class ScheduleFree(WeightAverage):
    """Schedule-free training (Defazio et al. 2024) around any optimizer's step Δ.

    Gradients are computed at y = z + β·(x − z). Then z ← z + Δ(y) and x ← x + c·(z − x), with
    c = r² / Σ r² over the rates r so far. Evaluation and export use x, and the learning rate does not
    need to decay. Masters hold y, `weights` x and `base` z. A skipped step changes none of them.
    """

    def __init__(
        self, model: nn.Module, optimizer: MasterOptimizer, batch_norm: BatchNormState, beta: float
    ) -> None:
        super().__init__(model, optimizer, batch_norm, math.inf)
        self._beta = beta
        self.base = [weight.clone() for weight in self.weights]
        self._rate = torch.zeros((), dtype=torch.float64, device=self._count.device)

    def set_rate(self, rate: float) -> None:
        self._rate.fill_(rate)

    def add(self, discard: Tensor) -> None:
        """Computes the three updates from the optimizer's step of y. `_count` is the sum of r²."""
        masters = [m.detach() for m in self._optimizer.masters()]
        squared = (1 - discard.double()) * self._rate.square()
        share = (squared / (self._count + squared).clamp(min=1e-300)).float()
        moves = torch._foreach_sub([m.float() for m in masters], self._evaluated())
        torch._foreach_add_(self.base, moves)
        self._approach(self.base, share)
        self._count.add_(squared)
        torch._foreach_copy_(masters, self._evaluated())
        halves = [
            (p.detach(), m)
            for p, m in zip(self._parameters, masters, strict=True)
            if p.data_ptr() != m.data_ptr()
        ]
        if halves:
            torch._foreach_copy_([p for p, _ in halves], [m for _, m in halves])

    def _evaluated(self) -> list[Tensor]:
        """Returns y as a function of x and z alone, so that a skipped step reproduces the masters."""
        return list(torch._foreach_lerp(self.base, self.weights, self._beta))

    def _captured(self, rows: Tensor) -> dict[str, Any]:
        return super()._captured(rows) | {"base": list(self.base)}

    def restore(self, saved: dict[str, Any], group: Group) -> None:
        super().restore(saved, group)
        base = saved.get("base")
        if not saved:
            base = self.weights
        elif base is None:
            raise CheckpointError(
                "the checkpoint was written without optim.schedule_free",
                "resume with the checkpoint's settings, or start a new run with --pretrained",
            )
        torch._foreach_copy_(self.base, [weight.to(self._count.device) for weight in base])

    def describe(self, steps_per_epoch: float) -> str:
        return f"schedule-free, gradients {self._beta:g} of the way to the average"


def create_average(
    epochs: float, steps_per_epoch: float, model: nn.Module, optimizer: MasterOptimizer,
    batch_norm: BatchNormState, schedule_free: float = 0.0,
) -> WeightAverage | None:  # fmt: skip
    """Creates the average of `run.average_epochs` or `optim.schedule_free`.

    Args:
        epochs: Epochs over which to average; 0 is off.
        steps_per_epoch: Steps of an epoch.
        model: The model.
        optimizer: Its optimizer.
        batch_norm: Its batch-norm statistics.
        schedule_free: β of schedule-free training; 0 is off.

    Returns:
        The average, or None if both are off.

    Raises:
        ConfigError: If the average covers less than two steps.
    """
    if not schedule_free and epochs == 0:
        return None
    steps = epochs * steps_per_epoch
    if not schedule_free and steps < 2:
        raise ConfigError(
            "run.average_epochs", epochs,
            f"is less than two steps ({steps_per_epoch:g} in an epoch here)",
            f"use 0 (off), or at least {2 / steps_per_epoch:.3g}",
        )  # fmt: skip
    with explain_out_of_memory("while copying the weights for their average", _REMEDY):
        if schedule_free:
            return ScheduleFree(model, optimizer, batch_norm, schedule_free)
        return WeightAverage(model, optimizer, batch_norm, steps)


def applied(average: WeightAverage | None) -> Context[None]:
    """Returns `average.applied()`, or a context that does nothing if there is no average."""
    return nullcontext() if average is None else average.applied()
