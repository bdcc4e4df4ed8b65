"""Whether the crop kernel runs here, found out before the first batch.

In: the decoder's name and how its crops will be made. Out: nothing, or a ConfigError that says what to
do. The very kernel is built that the batches need, once: threads would otherwise all build it at once.
"""

from __future__ import annotations

import importlib.util

import torch

from paceline.core.errors import ConfigError
from paceline.data.on_device.own_stream import drained_stream

_LEVEL = 7


def check_crop_kernel(
    decoder: str, device: torch.device, *, size: int, hole: int, interleaved: bool
) -> None:
    problem = _problem(device, size, hole, interleaved)
    if problem:
        raise ConfigError(
            "data.decoder", decoder, f"its crops need Triton: {problem}",
            "install triton and a C compiler, or set data.decoder = 'auto'",
        )  # fmt: skip


def _problem(device: torch.device, size: int, hole: int, interleaved: bool) -> str:
    if importlib.util.find_spec("triton") is None:
        return "the package is not installed"
    try:
        with drained_stream(device):
            right = _stretched(device, size, hole, interleaved)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  (compilers and drivers raise what they like)
        lines = str(error).splitlines()
        return f"no kernel can be built: {lines[0][:160] if lines else type(error).__name__}"
    return "" if right else "a kernel gave a wrong result"


def _stretched(device: torch.device, size: int, hole: int, interleaved: bool) -> bool:
    """One image of one level, stretched: it must be of that level everywhere."""
    from paceline.data.on_device import crop_kernel as kernel

    image = torch.full((3, 2, 2), _LEVEL, dtype=torch.uint8, device=device)
    here, boxes = kernel.new_table(1)
    here[0, :7] = (image.data_ptr(), 2, 2, 0, 0, size, size)  # the hole lies outside
    boxes[0, kernel.BOX :] = (0, 0, 2, 2)
    out = torch.zeros((1, size, size, 3), dtype=torch.uint8, device=device)
    kernel.crop_into(out, torch.from_numpy(here).to(device), hole=hole, interleaved=interleaved)
    return bool((out == _LEVEL).all())
