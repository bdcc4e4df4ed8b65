"""The hyper-parameters of all groups as one small table on the device.

In: parameter groups, read on the host. Out: `Hyper`, one row each, and `HyperTable`, their copy on the
device: sent asynchronously, only when a value changed, always into the same memory, so that a captured
CUDA graph reads the rates of the day.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

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
