"""`BatchDecoder`: many JPEG files to pixels on the device at once.

In: files. Out: their pixels as tensors on the device, None for one that it cannot take. Two libraries do
it: nvJPEG through torchvision, and DALI.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from paceline.core.errors import ConfigError

DEVICE_DECODERS = ("nvjpeg", "dali")


@dataclass(frozen=True)
class Decoded:
    """`images` lie on the device once the current stream gets there, and until then `held` must stay:
    what the device may still be reading from."""

    images: list[torch.Tensor | None]
    held: Any


class BatchDecoder(Protocol):
    """Used by many threads at once, each on a stream of its own. `interleaved`: height × width × 3, else
    3 × height × width."""

    interleaved: bool

    def __call__(self, files: Sequence[bytes]) -> Decoded: ...

    def describe(self) -> str: ...


def create_batch_decoder(name: str, device: torch.device) -> BatchDecoder:
    """ConfigError where it is not to be had here, with why and the remedy."""
    if device.type != "cuda":
        raise ConfigError(
            "data.decoder", name, f"decodes on a GPU, but the device is {device}",
            "use run.device = 'cuda', or data.decoder = 'auto'",
        )  # fmt: skip
    if name == "dali":
        from paceline.data.on_device.dali_decode import DaliDecoder

        return DaliDecoder(device)
    from paceline.data.on_device.nvjpeg import NvJpegDecoder

    return NvJpegDecoder(device)
