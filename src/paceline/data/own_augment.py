"""Augmentation by the user's own functions: `ImageAugment` on the host, `BatchAugment` on the device.

The host's function takes one image after crop and flip, height × width × channels in uint8, and returns
one of the same shape. If it takes a second argument, that is a `numpy.random.Generator` which depends on
the run's seed, the epoch and the sample only: runs repeat and resume bit by bit, whatever thread or rank
does the work. The device's function takes and returns a normalized batch, samples × channels × height ×
width; torch's generators are seeded for each micro-batch.
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

# Uniform numbers of a sample that seed its generator; each carries 53 bits.
_SEED_DRAWS = 2


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


class ImageAugment(TrainTransform):
    """The training transform, followed by the user's function."""

    def __init__(self, settings: DataSettings, function: Callable[..., Any]) -> None:
        """ConfigError where the function takes neither one argument nor two."""
        super().__init__(settings)
        self._function = function
        self._name = name_of(function)
        self._takes_generator = _arguments(function, self._name) == 2
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
                f"it gets a {_shape(out)} uint8 array",
            ) from error
        if result is out:
            return
        if not isinstance(result, np.ndarray):
            raise self._wrong(f"a {type(result).__name__}", out)
        if result.shape != out.shape or result.dtype != np.uint8:
            raise self._wrong(f"a {_shape(result)} {result.dtype} array", out)
        out[...] = result

    def _wrong(self, found: str, out: Pixels) -> DataError:
        return DataError(
            f"augment: {self._name} returned {found}",
            f"it must return a {_shape(out)} uint8 array, as it gets",
        )


def _arguments(function: Callable[..., Any], name: str) -> int:
    """How many positional arguments without a default the function takes."""
    if not callable(function):
        raise ConfigError("augment", name, "is not callable", "give a function of one image")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # built in
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
    """The user's function on a normalized training batch, without gradients and outside of autocast.

    Only queues work, so that a CUDA graph can capture it if the function can be captured: what Python
    decides is decided once, at the capture, so chance must come from torch on the device.
    """

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], channels: int) -> None:
        """`channels` of the images; those that were added for speed are hidden from the function."""
        if not callable(function):
            raise ConfigError(
                "device_augment", type(function).__name__, "is not callable",
                "give a function of a batch",
            )  # fmt: skip
        self._function = function
        self._name = name_of(function)
        self._channels = channels

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        added = images.shape[1] - self._channels
        given = images[:, : self._channels] if added else images
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            result = self._call(given)
            if added:
                result = F.pad(result, (0, 0, 0, 0, 0, added))
        last = images.is_contiguous(memory_format=torch.channels_last)
        return result.contiguous(
            memory_format=torch.channels_last if last else torch.contiguous_format
        )

    def _call(self, given: torch.Tensor) -> torch.Tensor:
        capturing = _capturing(given)
        try:
            result = self._function(given)
        except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:
            if capturing and isinstance(error, RuntimeError):
                raise  # whoever captures goes on without a graph, where that is allowed
            if capturing:
                raise RunError(
                    f"device_augment: {self._name} cannot be captured in a CUDA graph "
                    f"({type(error).__name__}: {error})",
                    "use --set run.cuda_graphs=off, or only work on the device without .item()",
                ) from error
            raise RunError(
                f"device_augment: {self._name} raised {type(error).__name__}: {error}",
                f"it gets {_described(given)}",
            ) from error
        same = isinstance(result, torch.Tensor) and (
            (result.shape, result.dtype, result.device) == (given.shape, given.dtype, given.device)
        )
        if not same:
            raise RunError(
                f"device_augment: {self._name} returned {_described(result)}",
                f"it must return what it gets: {_described(given)}",
            )
        return result


def _capturing(batch: torch.Tensor) -> bool:
    return batch.is_cuda and torch.cuda.is_current_stream_capturing()


def _shape(pixels: Pixels) -> str:
    return " × ".join(map(str, pixels.shape))


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    kind = str(value.dtype).removeprefix("torch.")
    return f"a {' × '.join(map(str, value.shape))} {kind} tensor on {value.device}"
