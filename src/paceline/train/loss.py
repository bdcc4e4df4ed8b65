"""Losses: what training minimizes, and what evaluation reports; and `Mixing`: mixup and CutMix, which
change images and labels before.

Cross-entropy, binary cross-entropy and users' own functions, behind one interface that handles integer
labels, shares of classes (samples × classes), label smoothing and mixed images.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config import RunSettings
from paceline.core.errors import ConfigError, PacelineError, RunError
from paceline.core.imports import first_line, import_object
from paceline.train.components import Loss
from paceline.train.machine import derive_seed

# A row of a table of `Mixing`: the image's share outside of the box, and the box, where its share is 0.
_COLUMNS = 5


class TrainingLoss(ABC):
    """`own` is None, or each image's own share where images were mixed with those from the end of the
    batch: the labels are then those of both."""

    name: str

    @abstractmethod
    def total(self, outputs: Any, targets: Tensor, own: Tensor | None = None) -> Tensor:
        """Summed over the samples, in fp32."""

    @abstractmethod
    def evaluated(self, outputs: Any, targets: Tensor) -> Tensor:
        """Summed over the samples of a validation batch; without smoothing."""

    def describe(self) -> str:
        return self.name


class CrossEntropy(TrainingLoss):
    """Of the softmax; the default."""

    name = "cross_entropy"

    def __init__(self, smoothing: float = 0.0) -> None:
        self._smoothing = smoothing

    def total(self, outputs: Any, targets: Tensor, own: Tensor | None = None) -> Tensor:
        of = partial(F.cross_entropy, outputs.float(), label_smoothing=self._smoothing)
        if own is None:
            return of(targets, reduction="sum")
        first, second = (of(each, reduction="none") for each in (targets, targets.flip(0)))
        return (own * first + (1 - own) * second).sum()

    def evaluated(self, outputs: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.float(), targets, reduction="sum")


class BinaryCrossEntropy(TrainingLoss):
    """One sigmoid for each class, as in "ResNet strikes back" (Wightman et al. 2021); the loss of a
    sample is the mean over the classes, as timm has it."""

    name = "bce"

    def __init__(self, smoothing: float = 0.0) -> None:
        self._smoothing = smoothing

    def total(self, outputs: Any, targets: Tensor, own: Tensor | None = None) -> Tensor:
        shares = class_shares(targets, outputs.shape[1], own)
        # Of shares that add up to 1: a label's class gets 1 − s + s / classes, any other s / classes.
        smooth = shares * (1 - self._smoothing) + self._smoothing / outputs.shape[1]
        return self._sum(outputs, smooth)

    def evaluated(self, outputs: Any, targets: Tensor) -> Tensor:
        return self._sum(outputs, class_shares(targets, outputs.shape[1]))

    @staticmethod
    def _sum(outputs: Tensor, shares: Tensor) -> Tensor:
        losses = F.binary_cross_entropy_with_logits(outputs.float(), shares, reduction="none")
        return losses.mean(dim=1).sum()

    def describe(self) -> str:
        return "bce, mean over classes"


class OwnLoss(TrainingLoss):
    """A user's function of outputs and targets. It returns one loss for each sample, or their mean.

    Targets are integer labels; where images are mixed, shares of classes. Smoothing is left to it.
    `in_evaluation` is False where the function does not take the model's evaluation outputs:
    cross-entropy is reported then.
    """

    def __init__(self, function: Loss, name: str, classes: int | None = None) -> None:
        self.name = name
        self.in_evaluation = True
        self._function = function
        self._classes = classes

    def total(self, outputs: Any, targets: Tensor, own: Tensor | None = None) -> Tensor:
        if own is not None:
            targets = class_shares(targets, self._class_count(outputs), own)
        return self._call(outputs, targets)

    def evaluated(self, outputs: Any, targets: Tensor) -> Tensor:
        if not self.in_evaluation:
            return F.cross_entropy(outputs.float(), targets, reduction="sum")
        return self._call(outputs, targets)

    def describe(self) -> str:
        note = "" if self.in_evaluation else "; validation reports cross_entropy"
        return f"{self.name} (own; run.smoothing is not used){note}"

    def _class_count(self, outputs: Any) -> int:
        if self._classes is not None:
            return self._classes
        found: int = outputs.shape[1]
        return found

    def _call(self, outputs: Any, targets: Tensor) -> Tensor:
        samples = len(targets)
        try:
            value = self._function(in_fp32(outputs), targets)
        except (PacelineError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:
            if targets.is_cuda and torch.cuda.is_current_stream_capturing():
                raise  # an operation that cannot be captured: not the loss's own mistake
            raise RunError(
                f"the loss {self.name} failed ({first_line(error)})",
                "it is called with the model's outputs and the targets of a batch",
            ) from error
        if not isinstance(value, Tensor) or not value.is_floating_point():
            kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
            raise RunError(f"the loss {self.name} returned {kind}", "return a float tensor")
        if value.shape == ():
            return value.float() * samples
        if value.shape == (samples,):
            return value.float().sum()
        raise RunError(
            f"the loss {self.name} returned shape {tuple(value.shape)} for {samples} samples",
            f"return one loss for each sample, shape ({samples},), or their mean, shape ()",
        )


def in_fp32(outputs: Any) -> Any:
    """Tensors of half precision in fp32, also inside of tuples, lists and dictionaries."""
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.is_floating_point() else outputs
    if isinstance(outputs, dict):
        return {key: in_fp32(value) for key, value in outputs.items()}
    if type(outputs) in (tuple, list):
        return type(outputs)(in_fp32(value) for value in outputs)
    return outputs


def class_shares(targets: Tensor, classes: int, own: Tensor | None = None) -> Tensor:
    """Samples × classes in fp32, from integer labels or from shares; of two images where they were
    mixed."""
    shares = targets.float() if targets.is_floating_point() else _one_hot(targets, classes)
    if own is None:
        return shares
    return own[:, None] * shares + (1 - own[:, None]) * shares.flip(0)


def _one_hot(labels: Tensor, classes: int) -> Tensor:
    # Not F.one_hot, which reads the largest label on the host.
    return (labels[:, None] == torch.arange(classes, device=labels.device)).float()


LOSSES: dict[str, Callable[[float], TrainingLoss]] = {
    "cross_entropy": CrossEntropy,
    "bce": BinaryCrossEntropy,
}


def create_loss(
    settings: RunSettings, given: Loss | None = None, classes: int | None = None
) -> TrainingLoss:
    """The loss that the settings name, or the function that was given."""
    if given is not None:
        return OwnLoss(given, getattr(given, "__name__", type(given).__name__), classes)
    if settings.loss in LOSSES:
        return LOSSES[settings.loss](settings.smoothing)
    found = import_object("run.loss", settings.loss)
    if isinstance(found, type):
        # A class, such as torch.nn:MSELoss, has a function once it is created.
        found = _created(found, settings.loss)
    if not callable(found):
        raise ConfigError("run.loss", settings.loss, "is not a function", "name a callable")
    return OwnLoss(found, settings.loss, classes)


def _created(kind: type, name: str) -> Any:
    try:
        return kind()
    except Exception as error:
        raise ConfigError(
            "run.loss", name, f"cannot be created without arguments ({first_line(error)})",
            "name a function, or an object of that class",
        ) from error  # fmt: skip


def check_gradient(total: Tensor, loss: TrainingLoss) -> None:
    """Raises unless the loss depends on the model's parameters."""
    if not total.requires_grad:
        raise RunError(
            f"the loss {loss.name} has no gradient: it does not depend on the outputs, or detaches them",
            "compute it from the outputs with differentiable operations",
        )


class Mixing:
    """Mixes each image of a micro-batch with another one, and its label too.

    Mixup (Zhang et al. 2018) adds two images up, CutMix (Yun et al. 2019) puts a box of one into the
    other; with both on, each image takes one of the two at random. The other image is the one at the
    same place from the end. Shares are drawn image by image: one share for a whole batch would make the
    steps of large batches differ. `mixup` and `cutmix` are the parameters of their Beta distributions;
    0 is off.
    """

    def __init__(self, mixup: float, cutmix: float, size: int, seed: int) -> None:
        """`size`: width and height of the images in pixels."""
        self._mixup, self._cutmix = mixup, cutmix
        self._size = size
        self._seed = seed

    def table(self, step: int, number: int, samples: int) -> Tensor:
        """For `samples` images of micro-batch `number` of `step`, whichever rank computes it."""
        key = derive_seed(self._seed, step, number, "mixing")
        chance = np.random.Generator(np.random.Philox(key))
        table = np.zeros((samples, _COLUMNS), dtype=np.float32)
        table[:, 0] = chance.beta(self._mixup, self._mixup, samples) if self._mixup else 1
        if self._cutmix:
            boxes = self._boxes(chance, samples)
            boxed = np.zeros_like(table)
            boxed[:, 0], boxed[:, 1:] = 1, boxes
            takes = chance.random(samples) < (0.5 if self._mixup else 1)
            table[takes] = boxed[takes]
        return torch.from_numpy(table)

    def _boxes(self, chance: np.random.Generator, samples: int) -> npt.NDArray[np.int64]:
        """Top, bottom, left and right, cut off at the edges of the image."""
        side = self._size * np.sqrt(1 - chance.beta(self._cutmix, self._cutmix, samples))
        centre = chance.integers(0, self._size, (2, samples))
        first, last = centre - side.astype(int) // 2, centre + side.astype(int) // 2
        rows_and_columns = np.stack((first, last), axis=1).clip(0, self._size)
        return rows_and_columns.reshape(4, samples).T


def mixed(images: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The images, and what share of each is still its own."""
    height, width = images.shape[2:]
    own, top, bottom, left, right = (column.view(-1, 1, 1, 1) for column in table.unbind(1))
    rows = torch.arange(height, device=images.device).view(1, 1, -1, 1)
    columns = torch.arange(width, device=images.device).view(1, 1, 1, -1)
    inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    share = torch.where(inside, torch.zeros_like(own), own).to(images.dtype)
    kept = own * (1 - (bottom - top) * (right - left) / (height * width))
    return torch.lerp(images.flip(0), images, share), kept.flatten()
