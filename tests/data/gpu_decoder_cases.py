"""The GPU decoder on a CPU: Pillow replaces nvJPEG, and Triton's interpreter runs the crop kernel.

test_gpu_decoder.py runs this module in a separate process.
"""

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

from data.small import FileSource, encode
from paceline.core.errors import ConfigError, DataError
from paceline.data import (
    BatchPlan,
    DataSettings,
    EvalLoader,
    EvalTransform,
    SampleOrder,
    Source,
    TrainLoader,
    TrainTransform,
)
from paceline.data.device import gpu_decoder, kernels
from paceline.data.device.gpu_decoder import GpuDecoder
from paceline.data.device.nvjpeg import Decoded, DeviceImage, JpegFile
from paceline.data.loaders.create import create_host_decoder

CPU = torch.device("cpu")
SETTINGS = DataSettings(image_size=4, eval_resize=5, decoder="pillow", workers=2, cutout=2)
# Shrunk, stretched, kept; at edges and corners; wholly and hardly anything of the image.
BOXES = [
    ((12, 9), (0, 0, 12, 9)),
    ((12, 9), (7, 2, 9, 4)),
    ((7, 15), (1.25, 3.5, 6.75, 14.125)),
    ((5, 5), (0, 0, 5, 5)),
    ((1, 1), (0, 0, 1, 1)),
    ((14, 3), (0.5, 0.25, 13.5, 2.75)),
]


@pytest.fixture(autouse=True)
def _connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")


class PillowFiles:
    """Takes no file of one size: as if nvJPEG had failed with it."""

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


def jpegs() -> FileSource:
    """Sample 2 is corrupt, 3 a PNG, 4 of the size that the decoder does not take."""
    draw, files = np.random.default_rng(1), []
    for width, height in ((8, 6), (5, 9), (6, 6), (7, 7), (9, 6), (6, 8), (4, 4)):
        pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
        files.append(encode(pixels, "PNG" if len(files) == 3 else "JPEG", quality=95))
    files[2] = files[2][:60]
    return FileSource(files)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses chunks of at most two, so that batches have several and a later one has the corrupt sample."""
    monkeypatch.setattr(gpu_decoder, "CHUNK", 2)
    lock, crop_into = threading.Lock(), kernels.crop_into

    def alone(*arguments: Any, **more: Any) -> None:
        """The interpreter, unlike a GPU, runs one kernel at a time."""
        with lock:
            crop_into(*arguments, **more)

    monkeypatch.setattr(kernels, "crop_into", alone)


def on_host(source: Source, training: bool) -> Any:
    transform = (TrainTransform if training else EvalTransform)(SETTINGS)
    return create_host_decoder(source, transform, SETTINGS)


def on_gpu(source: Source, training: bool, files: PillowFiles, *notes: str) -> GpuDecoder:
    host, cutout = on_host(source, training), SETTINGS.cutout if training else 0
    return GpuDecoder(host, host.transform, files, "Pillow", CPU, cutout, notes)


def train(decoder: Any, share: float = 0.5, first_step: int = 1) -> TrainLoader:
    return TrainLoader(
        decoder, SampleOrder(7, 3), BatchPlan(7, 2, 5, 5, 1), rank=0, first_step=first_step,
        max_corrupt_share=share,
    )  # fmt: skip


def evaluation(decoder: Any) -> EvalLoader:
    return EvalLoader(decoder, 7, rank=0, world_size=1, batch_size=4, max_corrupt_share=0.5)


def test_training_batches_are_those_of_the_host() -> None:
    source, files = jpegs(), PillowFiles()
    with train(on_gpu(source, True, files)) as device, train(on_host(source, True)) as threads:
        for got, wanted in zip(device, threads, strict=True):
            assert torch.equal(got.labels, wanted.labels)
            assert got.corrupt == wanted.corrupt
            assert int((got.images.int() - wanted.images.int()).abs().max()) <= 1
            assert {"read", "decode", "augment"} <= set(got.spent)
        assert device.corrupt == threads.corrupt
        assert [sample.index for sample in device.corrupt] == [2]
        assert max(files.chunks) == 2
        assert "not supported by the GPU, " in device.note()
        assert "(the first: 4.jpg: width 9)" in device.note()


def test_a_successor_is_always_decoded_by_the_host() -> None:
    """The pixels do not depend on threads, on known corrupt samples, or on a resume."""
    source = jpegs()
    with train(on_gpu(source, True, PillowFiles()), first_step=0) as whole:
        batches = list(whole)
    with train(on_gpu(source, True, PillowFiles()), first_step=2) as resumed:
        (last,) = resumed
    assert torch.equal(last.images, batches[2].images)


def test_evaluation_leaves_out_the_corrupt_one() -> None:
    source, files = jpegs(), PillowFiles()
    with (
        evaluation(on_gpu(source, False, files, "not resident: x")) as device,
        evaluation(on_host(source, False)) as threads,
    ):
        for got, wanted in zip(device, threads, strict=True):
            assert got.labels.tolist() == wanted.labels.tolist()
            assert got.corrupt == wanted.corrupt
            assert int((got.images.int() - wanted.images.int()).abs().max()) <= 1
        assert device.note().startswith(
            "3 samples were decoded on the host: 2 not supported by the GPU, 1 after"
        )
        assert sum(len(batch) for batch in device) == 6
        assert files.refused == 1  # in the first pass; then it went straight to the host
        assert device.describe() == "Pillow, 2 threads (not resident: x)"


def test_few_connections_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = on_gpu(jpegs(), False, PillowFiles())
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "set CUDA_DEVICE_MAX_CONNECTIONS=32, it is 1" in decoder.describe()


def test_a_kernel_that_does_not_work_shows_before_the_first_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "crop_into", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="data.decoder = 'nvjpeg': .*gave a wrong result"):
        on_gpu(jpegs(), False, PillowFiles())


def test_too_many_corrupt_files_end_it() -> None:
    with (
        train(on_gpu(jpegs(), True, PillowFiles()), share=0.0, first_step=0) as loader,
        pytest.raises(DataError, match="1 corrupt of 7"),
    ):
        list(loader)


# --- the kernel against Pillow -----------------------------------------------------------------


def pixels(width: int, height: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def crop(
    images: list[np.ndarray], boxes: list[tuple[float, ...]], flips: list[bool], size: int,
    *, cutout: int = 0, corners: list[tuple[int, int]] | None = None,
) -> np.ndarray:  # fmt: skip
    held = [torch.from_numpy(image.transpose(2, 0, 1).copy()) for image in images]
    table, doubles = kernels.new_table(len(images))
    for i, image in enumerate(held):
        height, width, _ = images[i].shape
        corner = corners[i] if corners else (0, 0)
        # Backwards, so that a target is not its place in the table.
        target = len(held) - 1 - i
        table[i, :7] = (image.data_ptr(), height, width, flips[i], target, *corner)
        doubles[i, kernels.BOX :] = boxes[i]
    out = torch.zeros((len(images), size, size, 3), dtype=torch.uint8)
    kernels.crop_into(out, torch.from_numpy(table), cutout=cutout)
    return out.numpy()[::-1]


def by_pillow(image: np.ndarray, box: tuple[float, ...], flip: bool, size: int) -> np.ndarray:
    square = Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR, box)
    turned = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else square
    return np.asarray(turned)


def test_every_box_is_pillows_within_a_level() -> None:
    size, cases = 5, BOXES
    images = [pixels(*sides, seed) for seed, (sides, _) in enumerate(cases)]
    boxes = [box for _, box in cases]
    flips = [bool(i % 2) for i in range(len(cases))]
    found = crop(images, boxes, flips, size)
    for image, box, flip, got in zip(images, boxes, flips, found, strict=True):
        wanted = by_pillow(image, box, flip, size)
        apart = np.abs(got.astype(int) - wanted.astype(int))
        assert apart.max() <= 1
        # Sums may be halfway between two levels, and Pillow may resample vertically first.
        assert (apart > 0).mean() < 0.25


def test_a_cutout_is_where_the_host_has_it() -> None:
    image = np.full((20, 20, 3), 200, dtype=np.uint8)
    corners = [(2, 5), (-2, 7)]
    found = crop(
        [image, image], [(0, 0, 20, 20)] * 2, [False, True], 10, cutout=4, corners=corners,
    )  # fmt: skip
    for got, (top, left) in zip(found, corners, strict=True):
        wanted = np.full((10, 10, 3), 200, dtype=np.uint8)
        wanted[max(top, 0) : top + 4, max(left, 0) : left + 4] = 0
        assert np.array_equal(got, wanted)


def test_an_empty_table_writes_nothing() -> None:
    assert crop([], [], [], 8).shape == (0, 8, 8, 3)
