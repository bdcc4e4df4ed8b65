"""`accelerate`: faster implementations of parts of a model, for a custom loop.

The model must already have its final device and dtype. The faster implementation is used only in training
mode. Parameters, buffers and state-dict keys do not change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.process_groups import all_gather_json
from paceline.config import RunSettings
from paceline.core.errors import ConfigError, RunError
from paceline.core.extensions import provided
from paceline.core.settings import from_table
from paceline.custom_loop.context import agreed, several_ranks
from paceline.models.acceleration import AccelerationContext, Applied, Forward, Result
from paceline.train.fast_path import accelerate as apply_first
from paceline.train.fast_path import triton_problem
from paceline.train.model_checks import restored_buffers


class _AcceleratedForward:
    """Replaces the `forward` method of a model by a faster implementation.

    A copied or unpickled model uses its plain forward pass, because the acceleration refers to submodules
    of the original model.
    """

    def __init__(self, model: nn.Module, applied: Applied | None) -> None:
        self.model, self.applied = model, applied
        self._parts = tuple(map(id, model.modules())) if applied is not None else ()

    def __call__(self, *given: Any, **named: Any) -> Any:
        model, applied = self.model, self.applied
        trains = model.training and torch.is_grad_enabled() and len(given) == 1 and not named
        if applied is None or not trains:
            return type(model).forward(model, *given, **named)
        if tuple(map(id, model.modules())) != self._parts:
            raise RunError(
                "parts of the model were replaced after pl.accelerate",
                "replace them before pl.accelerate, or call undo() on its handle first",
            )
        return applied.forward(given[0])

    def __deepcopy__(self, memo: dict[int, Any]) -> _AcceleratedForward:
        return _AcceleratedForward(copy.deepcopy(self.model, memo), None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _AcceleratedForward, (self.model, None)


class Accelerated:
    """The handle that `accelerate` returns: describes the acceleration of a model, and undoes it.

    Example:
        handle = pl.accelerate(model)
        print(handle.describe())
        handle.undo()
    """

    def __init__(self, model: nn.Module, applied: Applied | None, reason: str) -> None:
        self._model, self._applied, self._reason = model, applied, reason
        if applied is not None:
            model.forward = _AcceleratedForward(model, applied)

    def describe(self) -> str:
        """Describes the acceleration, or says why the model is unchanged."""
        return self._reason if self._applied is None else self._applied.describe()

    def undo(self) -> None:
        """Restores the model's forward pass. A second call does nothing."""
        if self._applied is not None:
            del self._model.forward
            self._applied.undo()
            self._applied, self._reason = None, "undone"


def accelerate(
    model: nn.Module, *, example: Tensor | None = None, dtype: torch.dtype | None = None,
    **settings: Any,
) -> Accelerated:  # fmt: skip
    """Replaces the forward and backward pass of a model in training by a faster implementation.

    Supports Paceline's ResNets and AlexNet with norms, and the ResNets in torchvision and timm. All
    ranks call this function once, before the model is wrapped or copied, because copies use the plain
    forward pass.

    Args:
        model: The model, on its device. Fused implementations need a GPU and channels-last memory.
        example: A micro-batch of images on which the kernels of `fused_convolutions` are timed.
        dtype: dtype in which convolutions compute. The default is the dtype of the first weight.
        settings: Settings of `[run.accel]`, such as `recompute_norms=True`. `compile` is not allowed.

    Returns:
        A handle that can describe and undo the change.

    Raises:
        ConfigError: If a setting cannot be applied, its package is not installed, or the model is
            already accelerated.

    Example:
        >>> from paceline import create_model, ModelSettings
        >>> model = create_model(ModelSettings("resnet_tiny"), num_classes=10)
        >>> accelerate(model, recompute_norms=True).describe()
        'fused norms off (needs a GPU), compile off, norms recomputed'
    """
    if "compile" in settings:
        raise ConfigError(
            "compile",
            settings["compile"],
            "is not an argument of pl.accelerate",
            "use torch.compile",
        )
    installed = provided("accelerations")
    for name, value in settings.items() if not installed else ():
        raise ConfigError(name, value, "no acceleration is installed", "leave it out")
    own = from_table(RunSettings, "run", dict.fromkeys(installed, settings))
    if "forward" in vars(model):
        raise ConfigError(
            "model",
            type(model).__name__,
            "its forward pass is already replaced",
            "undo the earlier replacement first",
        )
    layers = (m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear))
    if (first := next(layers, None)) is None:
        raise ConfigError(
            "model", type(model).__name__, "has neither a convolution nor a linear layer",
            "leave pl.accelerate out",
        )  # fmt: skip
    context = AccelerationContext(
        device=first.device, dtype=dtype or first.dtype, kernel_problem=triton_problem(first.device),
        channels_last=first.dim() != 4 or first.is_contiguous(memory_format=torch.channels_last),
        calibrates=example is not None,
    )  # fmt: skip
    with agreed():
        applied, reason = apply_first(own, model, context)
    if applied is not None and example is not None:
        applied.calibrate(_Ranks(), partial(_trial, model, example), foreign=True)
    return Accelerated(model, applied, reason)


class _Ranks:
    """Collectives over torch's default process group, or over one rank if there is no group."""

    def agree_on(self, phase: str, make: Callable[[], Result]) -> Result:
        with agreed():
            return make()

    def all_gather(self, value: Any) -> list[Any]:
        return all_gather_json(value) if several_ranks() else [value]


def _trial(model: nn.Module, example: Tensor, forward: Forward) -> None:
    """Runs `forward` and its backward pass; leaves gradients, buffers and random states unchanged."""
    trained = [p for p in model.parameters() if p.requires_grad]
    devices = [example.device] if example.is_cuda else []
    with restored_buffers(model), torch.random.fork_rng(devices):
        total = forward(example).float().sum()
        torch.autograd.grad(total, trained, allow_unused=True)
