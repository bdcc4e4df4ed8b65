"""What one step works on, whichever path carries it out.

In: parameters with gradients. Out: `Row`, one parameter's four tensors; `Gates`, the device-side
switches of the step; `Outcome`, what the step leaves behind on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

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
