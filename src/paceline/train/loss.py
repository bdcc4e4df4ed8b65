"""The loss functions of training and evaluation, and `Mixing`, which implements mixup and CutMix.

Cross-entropy, binary cross-entropy and users' functions share one interface (`TrainingLoss`). Targets
are integer labels, or class probabilities (samples × classes) if images are mixed.
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
from torch.utils._pytree import tree_map_only

from paceline.config import RunSettings
from paceline.core.errors import ConfigError, PacelineError, RunError
from paceline.core.imports import first_line, import_object
from paceline.train.components import Loss
from paceline.train.machine import derive_seed

# Columns of a table of `Mixing`: an image's weight outside of its box, and the box (top, bottom, left,
# right). Inside the box, the weight is 0.
_COLUMNS = 5


class TrainingLoss(ABC):
    """The base class of loss functions for training and evaluation."""

    name: str

    @abstractmethod
    def total(self, outputs: Any, targets: Tensor, own: Tensor | None = None) -> Tensor:
        """Returns the loss in fp32, summed over the samples.

        Args:
            outputs: The model's outputs.
            targets: Labels or class probabilities.
            own: If images are mixed, the weight of each image in its mixture; else None. Image i is
                mixed with the image at position i from the end of the batch.
        """

    @abstractmethod
    def evaluated(self, outputs: Any, targets: Tensor) -> Tensor:
        """Returns the loss of a validation batch without label smoothing, summed over the samples."""

    def describe(self) -> str:
        """Describes the loss function, for display at the start of the run."""
        return self.name


class CrossEntropy(TrainingLoss):
    """Cross-entropy of the softmax of the outputs; the default loss."""

    name = "cross_entropy"

    def __init__(self, smoothing: float = 0.0) -> None:
        self._smoothing = smoothing

    def total(self, outputs: Any, targets: Tensor, own: Tensor | None = None) -> Tensor:
        losses = partial(F.cross_entropy, outputs.float(), label_smoothing=self._smoothing)
        if own is None:
            return losses(targets, reduction="sum")
        first, second = (losses(each, reduction="none") for each in (targets, targets.flip(0)))
        return (own * first + (1 - own) * second).sum()

    def evaluated(self, outputs: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.float(), targets, reduction="sum")


class BinaryCrossEntropy(TrainingLoss):
    """Binary cross-entropy with one sigmoid per class.

    The loss follows "ResNet strikes back" (Wightman et al. 2021). The loss of a sample is the mean over
    the classes, as in timm.
    """

    name = "bce"

    def __init__(self, smoothing: float = 0.0) -> None:
        self._smoothing = smoothing

    def total(self, outputs: Any, targets: Tensor, own: Tensor | None = None) -> Tensor:
        probabilities = class_probabilities(targets, outputs.shape[1], own)
        # With smoothing s, the labeled class gets 1 − s + s / classes; all other classes get s / classes.
        smooth = probabilities * (1 - self._smoothing) + self._smoothing / outputs.shape[1]
        losses = F.binary_cross_entropy_with_logits(outputs.float(), smooth, reduction="none")
        return losses.mean(dim=1).sum()

    def evaluated(self, outputs: Any, targets: Tensor) -> Tensor:
        return BinaryCrossEntropy().total(outputs, targets)

    def describe(self) -> str:
        return "bce, mean over classes"


class OwnLoss(TrainingLoss):
    """A user's function of outputs and targets that returns one loss per sample, or their mean.

    Targets are integer labels, or class probabilities if images are mixed. `run.smoothing` is ignored.
    `in_evaluation` is False if the function does not accept the model's outputs in evaluation mode.
    Evaluations then report cross-entropy.
    """

    def __init__(self, function: Loss, name: str, classes: int | None = None) -> None:
        self.name = name
        self.in_evaluation = True
        self._function = function
        self._classes = classes

    def total(self, outputs: Any, targets: Tensor, own: Tensor | None = None) -> Tensor:
        if own is not None:
            classes = outputs.shape[1] if self._classes is None else self._classes
            targets = class_probabilities(targets, classes, own)
        return self._call(outputs, targets)

    def evaluated(self, outputs: Any, targets: Tensor) -> Tensor:
        if not self.in_evaluation:
            return F.cross_entropy(outputs.float(), targets, reduction="sum")
        return self._call(outputs, targets)

    def describe(self) -> str:
        note = "" if self.in_evaluation else "; validation reports cross_entropy"
        return f"{self.name} (own; run.smoothing is not used){note}"

    def _call(self, outputs: Any, targets: Tensor) -> Tensor:
        samples = len(targets)
        try:
            value = self._function(_in_fp32(outputs), targets)
        except (PacelineError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:
            if targets.is_cuda and torch.cuda.is_current_stream_capturing():
                raise  # an operation cannot be captured, which is not an error of the loss
            raise RunError(
                f"the loss {self.name} failed ({first_line(error)})",
                "fix the loss: it is called with the model's outputs and the targets of a batch",
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


def _in_fp32(outputs: Any) -> Any:
    """Converts tensors to fp32, including those inside tuples, lists and dictionaries."""
    return tree_map_only(Tensor, lambda t: t.float() if t.is_floating_point() else t, outputs)


def class_probabilities(targets: Tensor, classes: int, own: Tensor | None = None) -> Tensor:
    """Returns class probabilities in fp32, samples × classes.

    Args:
        targets: Integer labels or class probabilities.
        classes: Number of classes.
        own: If images are mixed, the weight of each image in its mixture; else None.
    """
    if targets.is_floating_point():
        probabilities = targets.float()
    else:
        # Not F.one_hot, which reads the largest label on the host.
        numbers = torch.arange(classes, device=targets.device)
        probabilities = (targets[:, None] == numbers).float()
    if own is None:
        return probabilities
    return own[:, None] * probabilities + (1 - own[:, None]) * probabilities.flip(0)


LOSSES: dict[str, Callable[[float], TrainingLoss]] = {
    "cross_entropy": CrossEntropy,
    "bce": BinaryCrossEntropy,
}


def create_loss(
    settings: RunSettings, given: Loss | None = None, classes: int | None = None
) -> TrainingLoss:
    """Creates the loss function of a run.

    Args:
        settings: The section `[run]`, whose `loss` names the loss.
        given: A loss function that the program has passed; takes precedence over the settings.
        classes: Number of classes, which a user's function needs if images are mixed.

    Raises:
        ConfigError: If the named object is not a loss.
    """
    if given is not None:
        return OwnLoss(given, getattr(given, "__name__", type(given).__name__), classes)
    if settings.loss in LOSSES:
        return LOSSES[settings.loss](settings.smoothing)
    function = import_object("run.loss", settings.loss)
    if isinstance(function, type):  # such as torch.nn:MSELoss
        try:
            function = function()
        except Exception as error:
            raise ConfigError(
                "run.loss", settings.loss,
                f"cannot be created without arguments ({first_line(error)})",
                "name a function, or an object of that class",
            ) from error  # fmt: skip
    if not callable(function):
        raise ConfigError("run.loss", settings.loss, "is not a function", "name a loss function")
    return OwnLoss(function, settings.loss, classes)


class Mixing:
    """Mixes the images of a micro-batch in pairs, by mixup or CutMix.

    Mixup (Zhang et al. 2018) adds two images. CutMix (Yun et al. 2019) replaces a box of one image by
    the same box of the other image. If both are enabled, each image uses one of the two methods at
    random. Image i from the start of the batch is mixed with image i from the end. Weights are drawn
    per image, because one weight for a whole batch would make the steps of large batches differ.
    `table` draws weights and boxes; the function `mixed` applies them.
    """

    def __init__(self, mixup: float, cutmix: float, size: int, seed: int) -> None:
        """Sets the methods and the seed of the random numbers.

        Args:
            mixup: Parameter of mixup's Beta distribution; 0 is off.
            cutmix: Parameter of CutMix's Beta distribution; 0 is off.
            size: Width and height of the images in pixels.
            seed: Seed of the run.
        """
        self._mixup, self._cutmix = mixup, cutmix
        self._size = size
        self._seed = seed

    def table(self, step: int, number: int, samples: int) -> Tensor:
        """Draws random weights and boxes for a micro-batch. They do not depend on the rank.

        Args:
            step: Number of the step.
            number: Number of the micro-batch in the step.
            samples: Number of images in the micro-batch.

        Returns:
            A tensor of samples × 5: the weight of each image outside of its box, and the box as top,
            bottom, left and right.
        """
        key = derive_seed(self._seed, step, number, "mixing")
        chance = np.random.Generator(np.random.Philox(key))
        table = np.zeros((samples, _COLUMNS), dtype=np.float32)
        table[:, 0] = chance.beta(self._mixup, self._mixup, samples) if self._mixup else 1
        if self._cutmix:
            boxes = self._boxes(chance, samples)
            takes = chance.random(samples) < (0.5 if self._mixup else 1)
            table[takes, 0], table[takes, 1:] = 1, boxes[takes]
        return torch.from_numpy(table)

    def _boxes(self, chance: np.random.Generator, samples: int) -> npt.NDArray[np.int64]:
        """Draws a box per image as top, bottom, left and right in pixels, clipped to the image."""
        side = self._size * np.sqrt(1 - chance.beta(self._cutmix, self._cutmix, samples))
        centre = chance.integers(0, self._size, (2, samples))
        first, last = centre - side.astype(int) // 2, centre + side.astype(int) // 2
        rows_and_columns = np.stack((first, last), axis=1).clip(0, self._size)
        return rows_and_columns.reshape(4, samples).T


def mixed(images: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Mixes images with the weights and boxes of `Mixing.table`.

    Returns the mixed images and each image's weight.
    """
    height, width = images.shape[2:]
    own, top, bottom, left, right = (column.view(-1, 1, 1, 1) for column in table.unbind(1))
    rows = torch.arange(height, device=images.device).view(1, 1, -1, 1)
    columns = torch.arange(width, device=images.device).view(1, 1, 1, -1)
    inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    weight = torch.where(inside, torch.zeros_like(own), own).to(images.dtype)
    kept = own * (1 - (bottom - top) * (right - left) / (height * width))
    return torch.lerp(images.flip(0), images, weight), kept.flatten()
