"""Augmentation by functions of the user: `ImageAugment` on the host, `BatchAugment` on the device.

The host function takes one image after crop and flip (height × width × channels, uint8) and returns
an image of the same shape. If the function takes a second argument, it receives a
`numpy.random.Generator` that depends only on seed, epoch and sample, so that runs repeat and resume
bit for bit. The device function takes and returns a normalized batch (samples × channels × height ×
width). torch's generators are seeded for each micro-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from paceline.core.errors import ConfigError, DataError, RunError
from paceline.data.augment import Pixels, TrainTransform
from paceline.data.settings import DataSettings

# Number of random numbers that seed the generator of a sample. Each has 53 bits.
_SEED_DRAWS = 2


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


class ImageAugment(TrainTransform):
    """The training transform, followed by a function of the user."""

    def __init__(self, settings: DataSettings, function: Callable[..., Any]) -> None:
        """Creates a transform that calls `function` after crop and flip.

        Raises:
            ConfigError: If the function does not take one or two arguments.
        """
        super().__init__(settings)
        self._function = function
        self._name = _name_of(function)
        self._takes_generator = _count_arguments(function, self._name) == 2
        self.draws += _SEED_DRAWS

    def finish(self, row: Sequence[float], out: Pixels) -> None:
        super().finish(row[:-_SEED_DRAWS], out)
        arguments: tuple[Any, ...] = (out,)
        if self._takes_generator:
            key = [int(number * 2**53) for number in row[-_SEED_DRAWS:]]
            arguments = (out, np.random.Generator(np.random.Philox(key=key)))
        try:
            result = self._function(*arguments)
        except Exception as error:
            raise DataError(
                f"augment: {self._name} raised {type(error).__name__}: {error}",
                f"its argument is {_described(out)}",
            ) from error
        if result is out:
            return
        is_array = isinstance(result, np.ndarray)
        if not is_array or (result.shape, result.dtype) != (out.shape, out.dtype):
            raise DataError(
                f"augment: {self._name} returned {_described(result)}",
                f"return {_described(out)}, as the argument is",
            )
        out[...] = result


def _count_arguments(function: Callable[..., Any], name: str) -> int:
    """Returns how many positional arguments without a default value the function has (1 or 2)."""
    if not callable(function):
        raise ConfigError("augment", name, "is not callable", "give a function of one image")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # a built-in function
        return 1
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    count = sum(p.default is p.empty for p in positional)
    required = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if count == 0 and (positional or any(p.kind is p.VAR_POSITIONAL for p in parameters)):
        count = 1
    if count not in (1, 2) or required:
        raise ConfigError(
            "augment", name, f"takes {count + len(required)} arguments",
            "give augment(image), or augment(image, generator)",
        )  # fmt: skip
    return count


class BatchAugment:
    """Applies a function of the user to a normalized training batch, without gradients and autocast.

    A CUDA graph can capture the call if it can capture the function. Python code of the function
    then runs once, during the capture.
    """

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], channels: int) -> None:
        """Creates the augmentation.

        Args:
            function: The function of the user. It takes and returns a batch.
            channels: Number of channels to pass to the function. A batch may have additional
                channels of zeros for speed.

        Raises:
            ConfigError: If `function` is not callable.
        """
        if not callable(function):
            raise ConfigError(
                "device_augment", type(function).__name__, "is not callable",
                "give a function of a batch",
            )  # fmt: skip
        self._function = function
        self._name = _name_of(function)
        self._channels = channels

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        added = images.shape[1] - self._channels
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            result = self._call(images[:, : self._channels] if added else images)
            if added:
                result = F.pad(result, (0, 0, 0, 0, 0, added))
        last = images.is_contiguous(memory_format=torch.channels_last)
        return result.contiguous(
            memory_format=torch.channels_last if last else torch.contiguous_format
        )

    def _call(self, batch: torch.Tensor) -> torch.Tensor:
        capturing = _capturing(batch)
        try:
            result = self._function(batch)
        except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:
            if capturing and isinstance(error, RuntimeError):
                raise  # the caller continues without a graph if that is allowed
            remedy = f"its argument is {_described(batch)}"
            if capturing:
                remedy = "use --set run.cuda_graphs=off, or only work on the device without .item()"
            raise RunError(
                f"device_augment: {self._name} raised {type(error).__name__}"
                f"{' in a CUDA graph' if capturing else ''}: {error}",
                remedy,
            ) from error
        same = isinstance(result, torch.Tensor) and (
            (result.shape, result.dtype, result.device) == (batch.shape, batch.dtype, batch.device)
        )
        if not same:
            raise RunError(
                f"device_augment: {self._name} returned {_described(result)}",
                f"return {_described(batch)}, as the argument is",
            )
        return result


def _capturing(batch: torch.Tensor) -> bool:
    return batch.is_cuda and torch.cuda.is_current_stream_capturing()


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor | np.ndarray):
        return f"a {type(value).__name__}"
    kind = f"{' × '.join(map(str, value.shape))} {str(value.dtype).removeprefix('torch.')}"
    return (
        f"a {kind} tensor on {value.device}"
        if isinstance(value, torch.Tensor)
        else f"a {kind} array"
    )
