"""`Components`: Python objects of a program, such as a model, that replace what settings name.

`pl.Trainer` creates `Components` from its arguments. Commands use no such objects: their settings name
everything, so they can evaluate, resume and export a run without the program that started the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from torch import Tensor, nn

from paceline.data import Source
from paceline.train.callbacks import Callback


class Loss(Protocol):
    """The type of a user's loss: maps the model's outputs (fp32) and targets to one value per sample.

    Targets are integer labels, or class probabilities (samples × classes) if images are mixed.
    """

    def __call__(self, outputs: Any, targets: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Components:
    """Python objects of a run. For each object that is None, the settings decide.

    Attributes:
        model: A module, or a function that returns a module. The function gets the keyword arguments
            `num_classes`, `in_channels` and `image_size`, as far as it accepts them.
        train_data: Source of the training images.
        val_data: Source of the validation images.
        loss: The loss function, which replaces `run.loss`.
        augment: A function that changes one decoded image on the host.
        device_augment: A function that changes a normalized batch on the device.
        optimizer: A function that creates an optimizer from parameter groups.
        callbacks: Callbacks, which are called for the events of the run.
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
        """Returns the names of the attributes that are not None."""
        values = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return [name for name, value in values if value is not None and value != ()]
