"""`Normalizer`: from stored pixels to what the model computes with.

In: uint8 images, samples × height × width × channels, in host memory. Out: float32 on the device, seen
as samples × channels × height × width in channels-last memory, (pixel / 255 − mean) / std. A quarter of
the bytes travels, and nothing is transposed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Normalizer:
    """One multiplication and one addition a pixel, with constants kept on each device."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], channels: int) -> None:
        """One value of `mean` or `std` stands for all channels."""
        for name, values in (("mean", mean), ("std", std)):
            if len(values) not in (1, channels):
                raise ValueError(f"{name} has {len(values)} values for {channels} channels")
        means = torch.tensor(mean, dtype=torch.float64).expand(channels)
        stds = torch.tensor(std, dtype=torch.float64).expand(channels)
        # Divided in float64 and rounded once, so the result is within one rounding of the formula.
        self._scale = (1 / (255 * stds)).to(torch.float32).view(1, channels, 1, 1)
        self._shift = (-means / stds).to(torch.float32).view(1, channels, 1, 1)
        self._on_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, images: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        """Queues the copy without waiting where `images` is pinned."""
        device = torch.device(device)
        scale, shift = self._constants(device)
        pixels = images.to(device, non_blocking=True).permute(0, 3, 1, 2)
        return pixels.to(torch.float32).mul_(scale).add_(shift)

    def _constants(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if device not in self._on_device:
            self._on_device[device] = (self._scale.to(device), self._shift.to(device))
        return self._on_device[device]
