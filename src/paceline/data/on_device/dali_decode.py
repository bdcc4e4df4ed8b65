"""`DaliDecoder`: JPEGs decoded on the GPU by NVIDIA DALI.

In: files. Out: interleaved pixels on the GPU. The thinnest use of DALI that serves: a pipeline that takes
our bytes and decodes; order, boxes, crops and corrupt files stay ours. On a CPU, for a test where DALI is
installed, the same pipeline decodes there; most tests have a stand-in.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from paceline.core.errors import ConfigError, RunError
from paceline.data.on_device.batch_decoder import (
    CHUNK,
    Decoded,
    DeviceImage,
    raise_if_memory,
    sound_jpeg,
    words_of,
)
from paceline.data.on_device.jpeg_facts import JpegFile
from paceline.data.on_device.own_stream import drained_stream, finish_current

_HOST_THREADS = 2


class DaliDecoder:
    """ConfigError where DALI is missing or cannot work here. One pipeline for each thread that calls."""

    interleaved = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._local = threading.local()
        try:
            self._dali: Any = importlib.import_module("nvidia.dali")
            self._fn: Any = importlib.import_module("nvidia.dali.fn")
            self._types: Any = importlib.import_module("nvidia.dali.types")
        except ImportError as error:
            raise ConfigError(
                "data.decoder", "dali", f"NVIDIA DALI cannot be imported ({error})",
                "pip install nvidia-dali-cuda120, or set data.decoder = 'nvjpeg' or 'auto'",
            ) from None  # fmt: skip
        try:
            with drained_stream(device):
                self._decode(self._pipeline(), [sound_jpeg()])
        except (RuntimeError, RunError) as error:
            raise ConfigError(
                "data.decoder", "dali", f"DALI cannot decode here ({words_of(error)[:120]})",
                "install the DALI of this CUDA, or set data.decoder = 'nvjpeg' or 'auto'",
            ) from None  # fmt: skip
        self._forget()  # it is this thread's, and others decode

    def __call__(self, files: Sequence[JpegFile]) -> Decoded:
        pipeline = self._pipeline()
        try:
            return _decoded(self._decode(pipeline, files))
        except RuntimeError as error:
            raise_if_memory(error)
            problem = words_of(error)[:120]
        # A pipeline that failed is of no more use; each file gets its chance in a new one.
        self._forget()
        images = [self._alone(file) for file in files]
        if self._alone(sound_jpeg()) is None:
            raise RunError(
                f"DALI no longer decodes even a sound file ({problem})",
                "start again with --resume auto, or set data.decoder = 'auto'",
            )
        return _decoded(images, problem)

    def _alone(self, file: JpegFile) -> torch.Tensor | None:
        pipeline = self._pipeline()
        try:
            return self._decode(pipeline, [file])[0]
        except RuntimeError as error:
            raise_if_memory(error)
            self._forget()
            return None

    def _decode(self, pipeline: Any, files: Sequence[JpegFile]) -> list[torch.Tensor | None]:
        pipeline.feed_input("files", [np.frombuffer(file.data, dtype=np.uint8) for file in files])
        (found,) = pipeline.run()
        # Copies on the current stream, done before the next run writes into DALI's memory.
        images: list[torch.Tensor | None] = [
            torch.utils.dlpack.from_dlpack(found[i]).clone() for i in range(len(files))
        ]
        finish_current(self._device)
        return images

    def _forget(self) -> None:
        self._local.__dict__.clear()

    def _pipeline(self) -> Any:
        """RunError where it cannot be built, which is no file's fault."""
        if not hasattr(self._local, "pipeline"):
            try:
                self._local.pipeline = self._built()
            except RuntimeError as error:
                raise_if_memory(error)
                raise RunError(
                    f"DALI cannot build its decoder ({words_of(error)[:120]})",
                    "set data.decoder = 'nvjpeg' or 'auto'",
                ) from error
        return self._local.pipeline

    def _built(self) -> Any:
        on_gpu = self._device.type == "cuda"
        pipeline = self._dali.Pipeline(
            batch_size=CHUNK, num_threads=_HOST_THREADS,
            device_id=(self._device.index or 0) if on_gpu else None, prefetch_queue_depth=1,
        )  # fmt: skip
        with pipeline:
            files = self._fn.external_source(name="files")
            rgb = self._types.DALIImageType.RGB
            pixels = self._fn.decoders.image(
                files,
                device="mixed" if on_gpu else "cpu",
                output_type=rgb,
                adjust_orientation=False,
            )
            pipeline.set_outputs(pixels)
        pipeline.build()
        return pipeline

    def describe(self) -> str:
        return f"DALI {self._dali.__version__}"


def _decoded(images: list[torch.Tensor | None], problem: str = "") -> Decoded:
    found = [
        None if image is None else DeviceImage(image.data_ptr(), image.shape[1], image.shape[0])
        for image in images
    ]
    return Decoded(found, images, problem)
