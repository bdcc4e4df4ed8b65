"""`NvJpegDecoder`: JPEGs decoded on the GPU, through torchvision.

In: files. Out: pixels in planes on the GPU. torchvision decodes a list in one call without Python's lock,
baseline files by the GPU's own JPEG engines where it has them. One file that cannot be decoded fails
the whole call: then each is tried alone.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from paceline.core.errors import ConfigError
from paceline.data.on_device.batch_decoder import Decoded

_INSTEAD = "or set data.decoder = 'auto'"


class NvJpegDecoder:
    """ConfigError where torchvision, or nvJPEG in it, is missing."""

    interleaved = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        try:
            self._io: Any = importlib.import_module("torchvision.io")
            self._version: str = importlib.import_module("torchvision").__version__
        except (ImportError, RuntimeError, OSError) as error:
            raise ConfigError(
                "data.decoder", "nvjpeg", f"torchvision cannot be imported ({_line(error)})",
                f"install the torchvision of this torch, with CUDA, {_INSTEAD}",
            ) from None  # fmt: skip
        try:
            self._decode(_tiny_jpeg())
        except (RuntimeError, AttributeError) as error:
            raise ConfigError(
                "data.decoder", "nvjpeg", f"torchvision cannot decode on the GPU ({_line(error)})",
                f"install a torchvision built with nvJPEG, {_INSTEAD}",
            ) from None  # fmt: skip

    def __call__(self, files: Sequence[bytes]) -> Decoded:
        # One block for all: torch takes no read-only bytes, and a join of bytes leaves Python's lock.
        joined = torch.frombuffer(bytearray().join(files), dtype=torch.uint8)
        parts = list(joined.split([len(file) for file in files]))  # type: ignore[no-untyped-call]
        try:
            return Decoded(self._decode(parts), joined)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return Decoded([self._alone(part) for part in parts], joined)

    def _alone(self, file: torch.Tensor) -> torch.Tensor | None:
        try:
            return self._decode([file])[0]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return None

    def _decode(self, files: list[torch.Tensor]) -> list[torch.Tensor | None]:
        mode = self._io.ImageReadMode.RGB
        found: list[torch.Tensor | None] = self._io.decode_jpeg(
            files, mode=mode, device=self._device
        )
        return found

    def describe(self) -> str:
        return f"nvJPEG of torchvision {self._version}"


def _tiny_jpeg() -> list[torch.Tensor]:
    stream = io.BytesIO()
    Image.new("RGB", (16, 16)).save(stream, "JPEG")
    return [torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
