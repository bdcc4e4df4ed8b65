from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.errors import DataError
from paceline.data.on_device import resident_set as module
from paceline.data.on_device.pixel_form import PixelForm
from paceline.data.on_device.resident_set import resident_set
from paceline.data.sources.cifar10 import Cifar10

CPU = torch.device("cpu")
FORM, SHAPE = PixelForm(1, 8, 8, "bilinear"), (8, 8, 1)
pytestmark = pytest.mark.usefixtures("no_leaked_threads")


@pytest.mark.parametrize("workers", [0, 3])
def test_every_sample_lies_at_its_index(
    memory_source: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 70 * 64)  # several pieces of several chunks
    source = memory_source(250, corrupt={3, 249}, size=12)
    held = resident_set(source, FORM, SHAPE, workers, CPU)
    want = torch.arange(250)
    want[[3, 249]] = 0
    assert torch.equal(held.images, want.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 8, 8, 1))
    assert held.labels.tolist() == list(range(250))
    assert {index: sample.name for index, sample in held.corrupt.items()} == {
        3: "memory:3",
        249: "memory:249",
    }
    assert held.describe() == "resident on cpu, 0 MiB"


def test_pixels_that_lie_ready_are_taken_as_they_are(tmp_path: Path, small_cifar: Any) -> None:
    source = Cifar10(small_cifar.write(tmp_path, "bin"), "train")
    source.read = lambda i: pytest.fail(f"sample {i} was read")  # type: ignore[method-assign]
    held = resident_set(source, PixelForm(3, 32, 32, "bilinear"), (32, 32, 3), 2, CPU)
    assert np.array_equal(held.images.numpy(), source.pixels)
    assert held.pixels[-1].tolist() == [0, 0, 0]


def test_decoded_once_as_long_as_the_source_lives(memory_source: Any) -> None:
    source = memory_source(20)
    held = resident_set(source, FORM, SHAPE, 0, CPU)
    assert resident_set(source, FORM, SHAPE, 2, CPU) is held
    assert len(source.reads) == 20
    assert resident_set(source, PixelForm(1, 8, 9, "bilinear"), SHAPE, 0, CPU) is not held
    assert resident_set(memory_source(20), FORM, SHAPE, 0, CPU) is not held
    gone = weakref.ref(held)
    del held, source
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("workers", [0, 2])
def test_failing_storage_ends_it(memory_source: Any, workers: int) -> None:
    source = memory_source(300)
    source.failure = DataError("gone")
    with pytest.raises(DataError, match="gone"):
        resident_set(source, FORM, SHAPE, workers, CPU)
    source.failure = None
    assert len(resident_set(source, FORM, SHAPE, workers, CPU)) == 300
