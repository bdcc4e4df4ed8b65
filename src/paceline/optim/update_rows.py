"""What one step works on, whichever path carries it out.

In: parameters with gradients. Out: `Row`, one parameter's four tensors; `Gates`, the device-side
switches of the step; `Outcome`, what the step leaves behind on the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import PacelineError, RunError

HALVES = (torch.float16, torch.bfloat16)
FORMATS = (torch.float32, *HALVES)


@dataclass(frozen=True, slots=True)
class Row:
    """`index` counts all parameters in group order. `master` is the parameter where that is fp32."""

    index: int
    group: int
    parameter: Tensor
    gradient: Tensor
    master: Tensor
    momentum: Tensor


@dataclass(frozen=True, slots=True)
class Gates:
    """Switches that are read on the device; None where unset."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    hold: Tensor | None = None
    active: Tensor | None = None

    def check(self, parameters: int, device: torch.device) -> None:
        """A switch on another device could not be read without waiting for it."""
        for name in self.__slots__:
            switch = getattr(self, name)
            if switch is None:
                continue
            if switch.device != device:
                raise RunError(
                    f"{name} lies on {switch.device}, the parameters on {device}",
                    f"move {name} to {device}",
                )
            wanted = parameters if name == "active" else 1
            if switch.numel() != wanted or not switch.is_contiguous():
                raise RunError(
                    f"{name} has shape {tuple(switch.shape)}",
                    f"give it {wanted} contiguous value{'s' * (wanted != 1)}",
                )


class Outcome:
    """Per parameter the ratio last used and whether its gradient was unusable; `overflow`: any was."""

    def __init__(self, parameters: int, device: torch.device) -> None:
        self.ratios = torch.ones(parameters, device=device)
        self.bad = torch.zeros(parameters, device=device)
        self.overflow = torch.zeros((), device=device)

    def clear(self) -> None:
        """As if no parameter had a gradient: what a step does not visit, it leaves like this."""
        self.ratios.fill_(1.0)
        self.bad.zero_()
        self.overflow.zero_()


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def same_strides(left: Tensor, right: Tensor) -> bool:
    """Whether both lie in memory alike; the stride of a dimension of size 1 means nothing."""
    a, b = left.stride(), right.stride()
    if a == b:
        return True
    return all(x == y for x, y, size in zip(a, b, left.shape, strict=True) if size > 1)


def require_dense(parameter: Tensor) -> None:
    """The kernels walk through memory: each element once, no gaps."""
    expected = 1
    dims = [d for d in zip(parameter.stride(), parameter.shape, strict=True) if d[1] != 1]
    for stride, size in sorted(dims):
        if stride != expected and parameter.numel() > 0:
            raise PacelineError(
                f"parameter of shape {tuple(parameter.shape)} and strides {parameter.stride()} has "
                "gaps or overlaps in memory",
                "make it a parameter of its own: nn.Parameter(tensor.clone())",
            )
        expected *= size


# The hyper-parameters of all groups as one small table on the device.
#
# In: parameter groups, read on the host. Out: `Hyper`, one row each, and `HyperTable`, their copy
# on the device: sent asynchronously, only when a value changed, always into the same memory, so
# that a captured CUDA graph reads the rates of the day.


FLAGS = ("nesterov", "lr_in_momentum", "clip", "adapt")


class Hyper(NamedTuple):
    """One group's values. The order of the fields is the order of the table's columns."""

    lr: float
    momentum: float
    weight_decay: float
    trust_coefficient: float
    eps: float
    nesterov: bool
    lr_in_momentum: bool
    clip: bool
    adapt: bool

    @classmethod
    def of(cls, group: dict[str, Any]) -> Hyper:
        """The row of a group; a rate that is a tensor is read, which waits for its device."""
        values: dict[str, Any] = {name: float(group[name]) for name in cls._fields}
        return cls(**values | {name: bool(group[name]) for name in FLAGS})

    def check(self) -> None:
        """Raises ValueError where a value cannot be used."""
        for name in ("lr", "weight_decay", "trust_coefficient", "eps"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} = {value}: must be 0 or more, and finite")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum = {self.momentum}: must be in [0, 1); try 0.9")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov = True: needs momentum; try momentum=0.9")


class HyperTable:
    """fp32, a row a group, on `device`."""

    def __init__(self, groups: int, device: torch.device) -> None:
        self.values = torch.zeros(groups, len(Hyper._fields), device=device)
        self._sent: tuple[Hyper, ...] | None = None

    def send(self, rows: tuple[Hyper, ...]) -> None:
        """Copies the rows to the device without waiting; nothing, where they lie there already."""
        if rows == self._sent:
            return
        # Fresh pinned memory each time: the last copy may still be reading its own.
        pinned = self.values.is_cuda
        host = torch.tensor(rows, dtype=torch.float32, pin_memory=pinned)
        self.values.copy_(host, non_blocking=pinned)
        self._sent = rows


# `StagedGradients`: gradients as an update can walk through them.
#
# In: gradients of any strides and floating format. Out: the same where they lie in memory as
# their parameters do, else copies in memory that stays, which a captured graph may know.


class StagedGradients:
    """Of one optimizer; copies are kept by the parameter's index."""

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}

    def of(self, index: int, group: int, parameter: Tensor, gradient: Tensor) -> Tensor:
        """The gradient with the parameter's strides, in fp32, fp16 or bf16."""
        if gradient.layout != torch.strided:
            raise RunError(
                f"sparse gradient for a parameter of shape {tuple(parameter.shape)} in group {group}",
                "make it dense (nn.Embedding(sparse=False)), or give it an optimizer of its own",
            )
        if same_strides(gradient, parameter) and gradient.dtype in FORMATS:
            return gradient
        copy = self._copies.get(index)
        kind = gradient.dtype if gradient.dtype in FORMATS else torch.float32
        if copy is None or copy.dtype != kind:
            copy = torch.empty_like(parameter, dtype=kind, memory_format=torch.preserve_format)
            self._copies[index] = copy
        return copy.copy_(gradient)


# fp32 masters and momentum of the parameters, and how they outlive a checkpoint.
#
# In: parameters in fp32, fp16 or bf16. Out: `state[p]` with `momentum_buffer` and, for half
# formats, `master`, both in fp32 with the parameter's own strides. torch casts the state of an
# fp16 parameter to fp16 as it loads (1.0001 becomes 1.0); `restore` puts the exact values back.


MASTER = "master"
MOMENTUM = "momentum_buffer"
State = dict[str, Any]


def create(parameter: Tensor, state: State, in_half: bool) -> None:
    """Fills in what is missing: zero momentum, and the master as a copy of the parameter."""
    require_dense(parameter)
    kind = parameter.dtype if in_half else torch.float32
    if state.get(MOMENTUM) is None:
        state[MOMENTUM] = torch.zeros_like(
            parameter, dtype=kind, memory_format=torch.preserve_format
        )
    if parameter.dtype in HALVES and not in_half and state.get(MASTER) is None:
        state[MASTER] = parameter.detach().to(torch.float32, memory_format=torch.preserve_format)


def restore(
    groups: list[dict[str, Any]],
    saved: Mapping[str, Any],
    old: Mapping[Tensor, State],
    new: dict[Tensor, State],
    in_half: bool,
) -> None:
    """Replaces the cast state in `new` by the saved values, in the memory of `old` where there is any.

    Memory is kept because a captured CUDA graph knows the addresses. A master that was saved for a
    parameter which is its own master now is dropped.
    """
    ids = chain.from_iterable(group["params"] for group in saved["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in groups)
    for name, parameter in zip(ids, parameters, strict=True):
        source = saved["state"].get(name)
        if source is None:
            continue
        state, kept = new[parameter], old.get(parameter, {})
        own_master = in_half or parameter.dtype not in HALVES
        for key in (MASTER, MOMENTUM):
            value = source.get(key)
            if key == MASTER and value is None and not own_master and MASTER in kept:
                state[MASTER] = kept[MASTER]  # what was saved in fp32 has none to give
                continue
            if value is None or (key == MASTER and own_master):
                state.pop(key, None)
                continue
            target = kept.get(key)
            if target is None:
                kind = parameter.dtype if in_half else torch.float32
                target = torch.empty_like(
                    parameter, dtype=kind, memory_format=torch.preserve_format
                ).detach()
            target.copy_(value)
            state[key] = target
