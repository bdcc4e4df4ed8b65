"""Defines the interface of accelerations: faster forward passes of a plain model for training.

An acceleration finds the submodules that it supports and computes them faster. The acceleration shares
the model's parameters and buffers and does not change the model, so evaluation, checkpoints and export
use the plain model. `accelerations` lists the installed and the registered accelerations.
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
    """Facts other than the model that an acceleration may depend on.

    Attributes:
        device: Device of the model in training.
        dtype: dtype of activations and convolution weights.
        channels_last: True if activations have NHWC memory.
        kernel_problem: The reason why Triton kernels cannot run; empty if they can.
        collective_norms: True if batch norms exchange statistics between ranks in each pass.
        calibrates: True if `Applied.calibrate` will be called before the first step.
        settings: Settings of the acceleration, such as `[run.accel]`; None for an acceleration
            without settings.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    channels_last: bool = True
    kernel_problem: str = ""
    collective_norms: bool = False
    calibrates: bool = True
    settings: Any = None


class TrialPass(Protocol):
    """Runs a forward and a backward pass that change no state, to find errors before the first step.

    Raises the errors that the first step would raise.
    """

    def __call__(self, forward: Forward) -> object: ...


class Ranks(Protocol):
    """Collectives between the ranks, for `Applied.calibrate`. All ranks must make the same calls."""

    def agree_on(self, phase: str, make: Callable[[], Result]) -> Result:
        """Calls `make` and returns the result. If it fails on any rank, all ranks raise that error.

        `phase` names the work in the error message.
        """
        ...

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks in rank order. Values must consist of JSON types."""
        ...


class Applied:
    """An acceleration of one model. Subclasses define `forward` as a method or an attribute.

    Attributes:
        forward: Forward pass for training; `calibrate` may replace it.
        input_channels: Number of input channels that `forward` expects, if images have fewer. The
            additional channels must be 0.
    """

    forward: Forward
    input_channels: int | None = None

    @property
    def gradients_at_end(self) -> bool:
        """True if all gradients become ready only at the end of backward.

        The gradient all-reduce then cannot overlap with the backward pass.
        """
        return False

    def calibrate(self, ranks: Ranks, trial: TrialPass, *, foreign: bool) -> None:
        """Makes the choices that need a forward and backward pass, equally on all ranks.

        Args:
            ranks: Collectives with which the ranks agree.
            trial: Runs a trial pass.
            foreign: True if the model is not part of Paceline.
        """

    def describe(self) -> str:
        """Returns a text for the log that describes how the model is accelerated."""
        return type(self).__name__

    def advise(self, error: Exception) -> Sequence[str]:
        """Returns texts that suggest remedies for an error in a step, the most promising first."""
        return ()

    def undo(self) -> None:
        """Frees resources and reverts changes of process-wide state."""


class Acceleration(Protocol):
    """Interface of an acceleration, which replaces the forward pass of models that it supports."""

    def supports(self, model: nn.Module, context: AccelerationContext) -> str:
        """Returns why the model cannot be accelerated, or "" if it can. Changes nothing.

        Raises ConfigError if the settings demand something that is not possible.
        """
        ...

    def apply(self, model: nn.Module, context: AccelerationContext) -> Applied:
        """Returns the accelerated forward pass of the model, which itself does not change."""
        ...


_ACCELERATIONS: Registry[Acceleration] = Registry("accelerations", {})


def register_acceleration(name: str, acceleration: Acceleration) -> None:
    """Registers an acceleration for this process, with priority over earlier and Paceline's own ones.

    A second call with the name replaces the first.

    Args:
        name: Name of the acceleration.
        acceleration: An object with `supports` and `apply`.

    Raises:
        ConfigError: If the object is a class or lacks a method.
    """
    missing = [part for part in ("supports", "apply") if not hasattr(acceleration, part)]
    if missing or isinstance(acceleration, type):
        problem = f"has no {missing[0]}" if missing else "is a class"
        shown = getattr(acceleration, "__name__", type(acceleration).__name__)
        raise ConfigError("acceleration", shown, problem, "give an object with supports and apply")
    _ACCELERATIONS.register(name, acceleration)


def accelerations(
    asked: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, Acceleration]]:
    """Yields the name and object of each acceleration: registered ones, latest first, then built-in ones.

    Args:
        asked: Returns True for the names of the built-in accelerations to load.
    """
    for name in (*reversed(_ACCELERATIONS.outside()), *filter(asked, provided("accelerations"))):
        yield name, _ACCELERATIONS.get(name, f"run.{name}")
