"""`Memory`: what an exchange remembers from step to step.

Most exchanges remember nothing. Those that compress gradients keep what they have cut off; those that let
ranks train apart for some steps keep each rank's own weights. Such state differs between ranks. It is
part of the checkpoint, and a step that leaves no trace leaves none here either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Memory:
    """The base: each method does nothing.

    `kind` names the state in a checkpoint and in notes, in the plural. `scale` is the loss scale of the
    step on the device, in whose unit gradients arrive. `ranks_differ`: weights differ between ranks from
    one step to the next, so that no rank has the state of all.
    """

    kind = "memories"
    ranks_differ = False

    def __init__(self) -> None:
        self.scale: Tensor | None = None

    def bind(self, weights: Weights) -> None:
        """Once, before the first step."""

    def settle(self, discard: Tensor) -> None:
        """After the update; `discard`, a flag on the device, says whether the step leaves no trace."""

    def shared(self) -> AbstractContextManager[None]:
        """Inside the context, and on all ranks at once, the model has the weights that the ranks have in
        common: what is evaluated and saved."""
        return nullcontext()

    def conclude(self) -> None:
        """After the last step of the run, on all ranks: they end with equal weights."""

    @property
    def state_bytes(self) -> int:
        """Of the device's memory, on this rank."""
        return 0

    def step_bytes(self, gradient_bytes: float) -> float:
        """What a rank sends in a step like the last one, in place of its `gradient_bytes`."""
        return gradient_bytes

    def state(self) -> dict[str, Any]:
        """This rank's, for a checkpoint: tensors, numbers and texts."""
        return {}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """What `state` gave on this rank of as many, with the same plan."""


class Weights:
    """The trained weights of this rank, for a memory that changes them: fp32 masters, and the parameters
    that the model computes with, which may be rounded or the masters themselves."""

    def __init__(self, optimizer: Any) -> None:
        """Of a `paceline.optim.MasterOptimizer`."""
        self._optimizer = optimizer

    @property
    def masters(self) -> list[Tensor]:
        found: list[Tensor] = self._optimizer.masters()
        return found

    @torch.no_grad()
    def copy(self) -> list[Tensor]:
        return [master.detach().clone() for master in self.masters]

    @torch.no_grad()
    def load(self, values: Sequence[Tensor]) -> None:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for master, parameter, value in zip(self.masters, parameters, values, strict=True):
            master.copy_(value)
            if parameter is not master:
                parameter.copy_(value)

    def momenta(self) -> dict[Any, dict[str, Any]]:
        """The optimizer's own state, by the number of the parameter, without masters."""
        found: dict[Any, dict[str, Any]] = self._optimizer.state_dict()["state"]
        return {
            number: {key: value for key, value in entry.items() if key != "master"}
            for number, entry in found.items()
        }

    def load_momenta(self, saved: Mapping[Any, dict[str, Any]]) -> None:
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": dict(saved), "param_groups": groups})
