"""`Components`: Python objects that take the place of what settings name.

`pl.Trainer` fills them from its arguments. The command line has none: everything that it runs is named
in the settings, so that a run folder can be evaluated, resumed and exported without the program that
started it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from torch import Tensor, nn

from paceline.data import Source
from paceline.train.callbacks import Callback


class Loss(Protocol):
    """One value for each sample, from the model's outputs in fp32 and integer labels or, for mixed or
    soft labels, shares of each class (samples × classes)."""

    def __call__(self, outputs: Any, targets: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Components:
    """`model` is a module, or a function that returns one for the keyword arguments `num_classes`,
    `in_channels` and `image_size`, as far as it takes them. `train_data` and `val_data` are sources.
    `augment` changes one decoded image on the host, `device_augment` a normalized batch on the device.
    `optimizer` makes an optimizer of parameter groups. `callbacks` run at the
    events of the run.
    """

    model: nn.Module | Callable[..., nn.Module] | None = None
    train_data: Source | None = None
    val_data: Source | None = None
    loss: Loss | None = None
    augment: Callable[..., Any] | None = None
    device_augment: Callable[[Tensor], Tensor] | None = None
    optimizer: Callable[..., Any] | None = None
    callbacks: Sequence[Callback] = ()

    def names(self) -> list[str]:
        """Those that are given."""
        found = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return [name for name, value in found if value is not None and value != ()]
