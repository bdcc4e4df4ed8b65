"""`NvJpegDecoder`: JPEGs decoded on the GPU, through torchvision.

In: files. Out: pixels in planes on the GPU. torchvision decodes a list in one call without Python's lock,
baseline files by the GPU's own JPEG engines where it has them. One file that cannot be decoded fails
the whole call: then each is tried alone. All that torchvision meets comes as one kind of error, so its
words must tell a file's fault from the GPU's.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

import torch

from paceline.core.errors import ConfigError, RunError
from paceline.data.on_device.batch_decoder import Decoded, raise_if_memory, sound_jpeg, words_of
from paceline.data.on_device.own_stream import drained_stream

_INSTEAD = "or set data.decoder = 'auto'"
# `Failed to decode batch: 3`. CUDA's own numbers, behind "synchronize CUDA stream", mean other things.
_STATUS = re.compile(r"fail(?:ed|ure)(?! to synchronize)[^:]*: (\d+)", re.IGNORECASE)
_ALLOCATOR_FAILURE = 5
# Invalid parameter, bad JPEG, not supported, execution failed, internal error, not implemented,
# incomplete. Some of them may also be the decoder's own trouble: a sound file then shows it.
_FILES_FAULTS = frozenset({2, 3, 4, 6, 8, 9, 10})


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
            self._decode_sound()
        except (RuntimeError, AttributeError) as error:
            raise_if_memory(error)
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
        except RuntimeError as error:
            raise_unless_a_file(error)
            problem = _line(error)
        images: list[torch.Tensor | None] = []
        for part in parts:
            try:
                images += self._decode([part])
            except RuntimeError as error:
                raise_unless_a_file(error)
                images.append(None)
        self._check_decoder()
        return Decoded(images, joined, problem)

    def _check_decoder(self) -> None:
        """After a failure. Every call begins with waiting for the decoder's own stream: this one also
        ends what the failed call may still have been writing, into memory that it gave back."""
        try:
            self._decode_sound()
        except RuntimeError as error:
            raise_if_memory(error)
            raise RunError(
                f"nvJPEG no longer decodes even a sound file ({_line(error)})",
                "start again with --resume auto, or set data.decoder = 'auto'",
            ) from error

    def _decode_sound(self) -> None:
        """On a stream of its own: the decoder writes into new memory without waiting for the stream
        that had it before, which may be the training's, still at work (pytorch/vision#9606)."""
        with drained_stream(self._device):
            self._decode([torch.frombuffer(bytearray(sound_jpeg()), dtype=torch.uint8)])

    def _decode(self, files: list[torch.Tensor]) -> list[torch.Tensor | None]:
        mode = self._io.ImageReadMode.RGB
        found: list[torch.Tensor | None] = self._io.decode_jpeg(
            files, mode=mode, device=self._device
        )
        return found

    def describe(self) -> str:
        return f"nvJPEG of torchvision {self._version}"


def raise_unless_a_file(error: RuntimeError) -> None:
    """Returns where a file is to blame; else raises `error`, or that memory ran out."""
    raise_if_memory(error)
    words = words_of(error)
    found = _STATUS.search(words)
    status = int(found[1]) if found else None
    if status == _ALLOCATOR_FAILURE:
        raise torch.OutOfMemoryError(words) from error
    if status not in _FILES_FAULTS and "chroma subsampling" not in words:
        raise error


def _line(error: Exception) -> str:
    return words_of(error)[:120]
