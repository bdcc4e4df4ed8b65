"""`Normalizer`: converts stored pixels to the input of the model, (pixel / 255 − mean) / std.

The input is uint8 (samples × height × width × channels) in host memory or on the device. A copy of
uint8 takes a quarter of the bytes of float32. The result is samples × channels × height × width, by
default in channels-last memory.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from copy import copy

import torch
import torch.nn.functional as F

from paceline.data.batch import ReusedMemory

# Number of values that fit into a core's cache, so that three passes read main memory only once.
_CHUNK = 64 * 1024
# Number of results whose memory is kept for reuse.
_KEPT_RESULTS = 4


class Normalizer:
    """Normalizes images with one multiplication and one addition per value, in float32.

    Calls do not synchronize with the device. Call `prepare` before capturing a CUDA graph.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        channels: int,
        dtype: torch.dtype = torch.float32,
        *,
        channels_out: int | None = None,
        channels_last: bool = True,
        kernel: bool = True,
    ) -> None:
        """Creates a normalizer.

        Args:
            mean: One mean for all channels, or one per channel, on the scale 0 to 1.
            std: One standard deviation for all channels, or one per channel, on the same scale.
            channels: Number of channels of the images.
            dtype: Type of the result. The result is rounded to this type once.
            channels_out: Number of channels of the result. Additional channels are zeros. GPUs
                compute convolutions of four channels faster than convolutions of three.
            channels_last: True for a result in channels-last memory, False for contiguous memory.
            kernel: Uses the Triton kernel on a GPU.

        Raises:
            ValueError: If the number of values does not match `channels`.
        """
        for name, values in (("mean", mean), ("std", std)):
            if len(values) not in (1, channels):
                raise ValueError(f"{name} has {len(values)} values for {channels} channels")
        means = torch.tensor(mean, dtype=torch.float64).expand(channels)
        stds = torch.tensor(std, dtype=torch.float64).expand(channels)
        # Computed in float64 and rounded once, so the result is within one rounding of the formula.
        self._scale = (1 / (255 * stds)).to(torch.float32).view(1, channels, 1, 1)
        self._shift = (-means / stds).to(torch.float32).view(1, channels, 1, 1)
        self.dtype = dtype
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        self._kernel = kernel
        self._extra = (channels_out or channels) - channels
        if self._extra < 0:
            raise ValueError(
                f"channels_out = {channels_out} must not be below channels = {channels}"
            )
        self._on_device: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._memory = ReusedMemory(_KEPT_RESULTS)

    def without_padding(self) -> Normalizer:
        """Returns a normalizer without additional channels, for a model without accelerations."""
        if not self._extra:
            return self
        plain = copy(self)
        plain._extra = 0
        return plain

    def __call__(self, images: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        """Normalizes `images` on `device`. The copy of pinned images is asynchronous."""
        scale, shift = self.prepare(device)
        images = images.to(device, non_blocking=True)
        if self._kernel and images.is_cuda and _has_triton():
            from paceline.data.device.kernels import normalized

            result = normalized(images, scale, shift, self.dtype, self._extra)
            return result.contiguous(memory_format=self._format)
        # torch.compile needs the plain operators below.
        plain = self.dtype == torch.float32 and not self._extra and images.device.type == "cpu"
        if plain and images.is_contiguous() and not torch.compiler.is_compiling():
            return self._chunked(images).contiguous(memory_format=self._format)
        pixels = images.permute(0, 3, 1, 2)
        result = pixels.to(torch.float32).mul_(scale).add_(shift).to(self.dtype)
        if self._extra:
            result = F.pad(result, (0, 0, 0, 0, 0, self._extra))
        return result.contiguous(memory_format=self._format)

    def _chunked(self, images: torch.Tensor) -> torch.Tensor:
        """Normalizes a few images at a time, which fit into the CPU's cache. Reuses memory.

        The result has the same bits as that of the plain operators, which take several times as
        long.
        """
        samples, height, width, channels = images.shape
        scale, shift = (c.view(1, -1).repeat(1, width) for c in (self._scale, self._shift))
        result = self._memory.take((samples * height, width * channels), torch.float32)
        lines = images.view(samples * height, width * channels)
        step = max(1, _CHUNK // (width * channels))
        for start in range(0, len(lines), step):
            result[start : start + step].copy_(lines[start : start + step]).mul_(scale).add_(shift)
        return result.view(samples, height, width, channels).permute(0, 3, 1, 2)

    def prepare(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the scale and the shift on `device`.

        The first call copies both to the device, which a CUDA graph cannot capture.
        """
        name = str(device)
        if name not in self._on_device:
            self._on_device[name] = (self._scale.to(device), self._shift.to(device))
        return self._on_device[name]


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
