"""The GPU's loaders on a CPU: Pillow in place of nvJPEG, the kernel interpreted. Run by
test_device_loader.py in a process of its own."""

from __future__ import annotations

import interpreted  # noqa: F401  # isort: skip  (before any kernel's module)

import io
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.core.errors import ConfigError, DataError
from paceline.data.batch_plan import BatchPlan
from paceline.data.loader import EvalLoader, TrainLoader
from paceline.data.on_device import crop_kernel, device_loader, device_reader
from paceline.data.on_device.batch_decoder import Decoded, DeviceImage
from paceline.data.on_device.device_loader import DeviceEvalLoader, DeviceTrainLoader
from paceline.data.on_device.jpeg_facts import JpegFile
from paceline.data.settings import DataSettings

CPU = torch.device("cpu")
SETTINGS = DataSettings(
    image_size=4, eval_resize=5, decoder="nvjpeg", workers=2, max_corrupt_share=0.5, cutout=2
)


@pytest.fixture(autouse=True)
def _connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")


class PillowDecoder:
    """Takes no file of one size: as if nvJPEG had failed with it."""

    interleaved = False

    def __init__(self) -> None:
        self.chunks: list[int] = []
        self.refused = 0

    def __call__(self, files: Sequence[JpegFile]) -> Decoded:
        images: list[DeviceImage | None] = []
        held = []
        self.chunks.append(len(files))
        for file in files:
            image = Image.open(io.BytesIO(bytes(file.data))).convert("RGB")
            planes = torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())
            held.append(planes)
            found = DeviceImage(planes.data_ptr(), image.width, image.height)
            images.append(None if image.width == 9 else found)
            self.refused += image.width == 9
        return Decoded(images, held, "" if None not in images else "width 9")

    def describe(self) -> str:
        return "Pillow"


class Jpegs:
    """Sample 2 is corrupt, 3 a PNG, 4 of the size that the decoder does not take."""

    def __init__(self) -> None:
        draw = np.random.default_rng(1)
        self.labels = np.arange(7, dtype=np.int64)
        self.classes = [str(label) for label in self.labels]
        self.files = []
        for i, (width, height) in enumerate(
            ((8, 6), (5, 9), (6, 6), (7, 7), (9, 6), (6, 8), (4, 4))
        ):
            pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
            stream = io.BytesIO()
            Image.fromarray(pixels).save(stream, "PNG" if i == 3 else "JPEG", quality=95)
            self.files.append(stream.getvalue() if i != 2 else stream.getvalue()[:60])

    def __len__(self) -> int:
        return len(self.files)

    def read(self, i: int) -> bytes:
        return self.files[i]

    def name(self, i: int) -> str:
        return f"{i}.jpg"

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def pillow(monkeypatch: pytest.MonkeyPatch) -> PillowDecoder:
    """Chunks of at most two, so that batches have several, and the corrupt sample lies in a later one."""
    decoder = PillowDecoder()
    monkeypatch.setattr(device_reader, "create_batch_decoder", lambda name, device: decoder)
    monkeypatch.setattr(device_loader, "CHUNK", 2)
    lock, crop_into = threading.Lock(), crop_kernel.crop_into

    def alone(*arguments: Any, **more: Any) -> None:
        """The interpreter, unlike a GPU, runs one kernel at a time."""
        with lock:
            crop_into(*arguments, **more)

    monkeypatch.setattr(crop_kernel, "crop_into", alone)
    return decoder


def test_training_batches_are_those_of_the_threads(pillow: PillowDecoder) -> None:
    source, plan = Jpegs(), BatchPlan(7, 2, 5, 5, 1)
    host = DataSettings(**{**vars(SETTINGS), "decoder": "pillow"})
    common = {"seed": 3, "rank": 0, "first_step": 1}
    with (
        DeviceTrainLoader(source, plan, SETTINGS, device=CPU, **common) as device,
        TrainLoader(source, plan, host, **common) as threads,
    ):
        for got, wanted in zip(device, threads, strict=True):
            assert torch.equal(got.labels, wanted.labels)
            assert got.corrupt == wanted.corrupt
            apart = (got.images.int() - wanted.images.int()).abs()
            assert int(apart.max()) <= 1
            assert {"read", "decode", "augment"} <= set(got.spent)
        assert device.corrupt == threads.corrupt
        assert [sample.index for sample in device.corrupt] == [2]
        assert max(pillow.chunks) == 2
        assert "no JPEGs for the GPU, " in device.remark()
        assert "(the first: 4.jpg: width 9)" in device.remark()


def test_evaluation_leaves_out_the_corrupt_one(pillow: PillowDecoder) -> None:
    source = Jpegs()
    host = DataSettings(**{**vars(SETTINGS), "decoder": "pillow"})
    common = {"rank": 0, "world_size": 1, "batch_size": 4}
    with (
        DeviceEvalLoader(source, SETTINGS, device=CPU, **common) as device,
        EvalLoader(source, host, **common) as threads,
    ):
        for got, wanted in zip(device, threads, strict=True):
            assert got.labels.tolist() == wanted.labels.tolist()
            assert got.corrupt == wanted.corrupt
            assert int((got.images.int() - wanted.images.int()).abs().max()) <= 1
        assert device.describe() == "Pillow, 2 threads"
        said = device.remark()
        assert said.startswith(
            "3 samples were decoded on the host: 2 no JPEGs for the GPU, 1 after"
        )
        assert sum(len(batch) for batch in device) == 6
        assert pillow.refused == 1  # in the first pass; then it went straight to the host


def test_pixels_are_refused_and_what_was_chosen_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Jpegs()
    loader = DeviceEvalLoader(
        source, SETTINGS, rank=0, world_size=1, batch_size=4, device=CPU, remark="not resident: x"
    )
    assert loader.describe() == "Pillow, 2 threads (not resident: x)"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert loader.describe().endswith(
        "(not resident: x; slower than it could be: set CUDA_DEVICE_MAX_CONNECTIONS=32, it is 1)"
    )
    monkeypatch.setattr(source, "read", lambda i: np.zeros((4, 4, 3), dtype=np.uint8))
    with pytest.raises(ConfigError, match="data.decoder = 'nvjpeg': .* are stored as pixels; set"):
        DeviceEvalLoader(source, SETTINGS, rank=0, world_size=1, batch_size=4, device=CPU)


def test_a_kernel_that_does_not_work_shows_before_the_first_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crop_kernel, "crop_into", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="data.decoder = 'nvjpeg': .*gave a wrong result"):
        DeviceEvalLoader(Jpegs(), SETTINGS, rank=0, world_size=1, batch_size=4, device=CPU)


def test_too_many_corrupt_files_end_it() -> None:
    source, settings = Jpegs(), DataSettings(**{**vars(SETTINGS), "max_corrupt_share": 0.0})
    loader = DeviceTrainLoader(
        source, BatchPlan(7, 1, 7, 7, 1), settings, seed=0, rank=0, device=CPU
    )
    with loader, pytest.raises(DataError, match="1 corrupt of 7"):
        next(loader)
