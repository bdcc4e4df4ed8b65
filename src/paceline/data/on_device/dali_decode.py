"""`DaliDecoder`: JPEGs decoded on the GPU by NVIDIA DALI.

In: files. Out: interleaved pixels on the GPU. The thinnest use of DALI that serves: a pipeline that takes
our bytes and decodes; order, boxes, crops and corrupt files stay ours. Not run by our own tests: DALI
is on none of our machines.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from paceline.core.errors import ConfigError
from paceline.data.on_device.batch_decoder import Decoded

_LARGEST_CHUNK = 64
_HOST_THREADS = 2


class DaliDecoder:
    """ConfigError where DALI is missing. One pipeline for each thread that calls."""

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

    def __call__(self, files: Sequence[bytes]) -> Decoded:
        try:
            return self._decode(files)
        except RuntimeError:
            # A pipeline that failed is of no more use; each file gets its chance in a new one.
            self._local.__dict__.clear()
            alone = [self._alone(file) for file in files]
            return Decoded([found.images[0] if found else None for found in alone], alone)

    def _alone(self, file: bytes) -> Decoded | None:
        try:
            return self._decode([file])
        except RuntimeError:
            self._local.__dict__.clear()
            return None

    def _decode(self, files: Sequence[bytes]) -> Decoded:
        pipeline = self._pipeline()
        pipeline.feed_input("files", [np.frombuffer(file, dtype=np.uint8) for file in files])
        (found,) = pipeline.run()
        images: list[torch.Tensor | None] = []
        for i in range(len(files)):
            # A copy on the current stream: DALI's own memory is its pipeline's, for the next run.
            images.append(torch.utils.dlpack.from_dlpack(found[i]).clone())
        return Decoded(images, None)

    def _pipeline(self) -> Any:
        if not hasattr(self._local, "pipeline"):
            pipeline = self._dali.Pipeline(
                batch_size=_LARGEST_CHUNK, num_threads=_HOST_THREADS,
                device_id=self._device.index or 0, prefetch_queue_depth=1,
            )  # fmt: skip
            with pipeline:
                files = self._fn.external_source(name="files")
                rgb = self._types.DALIImageType.RGB
                pixels = self._fn.decoders.image(
                    files, device="mixed", output_type=rgb, adjust_orientation=False
                )
                pipeline.set_outputs(pixels)
            pipeline.build()
            self._local.pipeline = pipeline
        return self._local.pipeline

    def describe(self) -> str:
        return f"DALI {self._dali.__version__}"
