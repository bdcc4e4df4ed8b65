"""Accelerations: faster forward passes of a plain model, which replace its own in training.

An acceleration finds the parts of a model that it knows and computes them in another way. It shares the
model's parameters and buffers and leaves the model as it is: evaluation, checkpoints and export use that.
`accelerations` lists those of this installation by name, and those that `register_acceleration` added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from paceline.core.errors import ConfigError
from paceline.core.extensions import Registry, provided

Result = TypeVar("Result")
Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class AccelerationContext:
    """What an acceleration may depend on, besides the model.

    Attributes:
        device: The device of the model in training.
        dtype: Number format of maps and convolutions.
        channels_last: Maps are in NHWC memory.
        kernel_problem: The reason why Triton's kernels cannot run here; "" if they can.
        collective_norms: Batch norms exchange their statistics inside of a pass.
        calibrates: `Applied.calibrate` follows.
        settings: The owner's table, as in `[run.accel]`; None without one.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    channels_last: bool = True
    kernel_problem: str = ""
    collective_norms: bool = False
    calibrates: bool = True
    settings: Any = None


class TrialPass(Protocol):
    """A forward and backward pass that changes nothing. Raises the errors of a first step."""

    def __call__(self, forward: Forward) -> object: ...


class Ranks(Protocol):
    """All ranks of a training, in `Applied.calibrate`. All of them make the same calls."""

    def agree_on(self, phase: str, make: Callable[[], Result]) -> Result:
        """Returns what `make` returns on this rank, if it fails on none; else all raise the error."""
        ...

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks in their order; they consist of what JSON has."""
        ...


class Applied:
    """An acceleration of one model. Subclasses need `forward`, a method or an attribute.

    Attributes:
        forward: The pass in training; `calibrate` may replace it.
        input_channels: Channels of the images that it takes, if more than they have: the others are 0.
    """

    forward: Forward
    input_channels: int | None = None

    @property
    def gradients_at_end(self) -> bool:
        """True if backward yields all gradients at its end, so that an exchange overlaps nothing."""
        return False

    def calibrate(self, ranks: Ranks, trial: TrialPass, *, foreign: bool) -> None:
        """Makes choices that need a pass, which are the same on all ranks. `foreign`: the model's code is
        a user's."""

    def describe(self) -> str:
        """Returns what is applied, for display and record."""
        return type(self).__name__

    def advise(self, error: Exception) -> Sequence[str]:
        """Returns what a user can do about an error of a step, the most promising first."""
        return ()

    def undo(self) -> None:
        """Frees what the acceleration holds, and reverts what it has changed in the process."""


class Acceleration(Protocol):
    """Finds out whether it knows a model, and applies itself to it."""

    def supports(self, model: nn.Module, context: AccelerationContext) -> str:
        """Returns "" if `apply` would change how the model computes, else the reason. Changes nothing.
        Raises ConfigError for a setting that cannot be obeyed."""
        ...

    def apply(self, model: nn.Module, context: AccelerationContext) -> Applied: ...


_ACCELERATIONS: Registry[Acceleration] = Registry("accelerations", {})


def register_acceleration(name: str, acceleration: Acceleration) -> None:
    """Adds an acceleration of this process, an object, which is asked before all others. A second call
    with the name replaces the first."""
    missing = [part for part in ("supports", "apply") if not hasattr(acceleration, part)]
    if missing or isinstance(acceleration, type):
        problem = f"has no {missing[0]}" if missing else "is a class"
        shown = getattr(acceleration, "__name__", type(acceleration).__name__)
        raise ConfigError("acceleration", shown, problem, "give an object with supports and apply")
    _ACCELERATIONS.register(name, acceleration)


def accelerations(
    asked: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, Acceleration]]:
    """Yields names and accelerations, the latest registered first. Those of this installation follow, and
    are loaded if they are `asked` for."""
    for name in (*reversed(_ACCELERATIONS.outside()), *filter(asked, provided("accelerations"))):
        yield name, _ACCELERATIONS.get(name, f"run.{name}")
