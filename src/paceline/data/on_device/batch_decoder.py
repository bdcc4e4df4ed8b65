"""`BatchDecoder`: many JPEG files to pixels on the device at once.

In: files. Out: where their pixels lie on the device, None for one that it cannot take. Two libraries do
it: nvJPEG and DALI. Trouble that is no file's fault ends the run: sent on to the
host, it would only be slow, and nobody would know why.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from PIL import Image

from paceline.core.errors import ConfigError
from paceline.data.on_device.jpeg_facts import JpegFile, jpeg_file

# How torch, DALI and C++ say that memory is short, in lower case.
_NO_MEMORY = (
    "out of memory",
    "failed to allocate",
    "allocation failed",
    "bad_alloc",
    "memoryallocation",
)

# Files of one call: many keep the GPU's JPEG engines busy, few let the next call's reading begin sooner.
CHUNK = 64


class DeviceImage(NamedTuple):
    """Pixels on the device: 3 × width × height bytes from `address` on."""

    address: int
    width: int
    height: int


@dataclass(frozen=True)
class Decoded:
    """`images` lie on the device once the current stream gets there, and until then `held` must stay:
    their memory, and what the device may still be reading from. `problem`: what the decoder said of the
    first file, or chunk, that it failed with."""

    images: list[DeviceImage | None]
    held: Any
    problem: str = ""


class BatchDecoder(Protocol):
    """Used by many threads at once, each on a stream of its own. `interleaved`: height × width × 3, else
    3 × height × width."""

    interleaved: bool

    def __call__(self, files: Sequence[JpegFile]) -> Decoded:
        """At most CHUNK files. OutOfMemoryError, RunError: trouble that is no file's fault."""

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


def sound_jpeg() -> JpegFile:
    """A file that every decoder can decode, of a size and kind that JPEG engines take too."""
    stream = io.BytesIO()
    Image.new("RGB", (128, 128)).save(stream, "JPEG", subsampling="4:2:0")
    found = jpeg_file(stream.getvalue())
    assert found is not None
    return found


def words_of(error: Exception) -> str:
    """An error's own words, without the trace that torch or DALI may add to them."""
    words = str(error).partition("Exception raised from")[0].partition("Stacktrace (")[0]
    return " ".join(words.split())


def raise_if_memory(error: Exception) -> None:
    """Libraries wrap running out of memory in errors of their own, which look like a bad file's."""
    words = words_of(error).lower()
    if isinstance(error, torch.OutOfMemoryError) or any(sign in words for sign in _NO_MEMORY):
        raise torch.OutOfMemoryError(words_of(error)) from error
