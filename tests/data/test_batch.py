from __future__ import annotations

import pytest
import torch

from paceline.data.batch import Batch, BatchBuffer, CorruptSample


def filled(samples: int) -> BatchBuffer:
    buffer = BatchBuffer(samples, image_size=4, channels=3, pin_memory=False)
    for i in range(samples):
        buffer.images[i], buffer.labels[i] = i, 10 * i
    return buffer


def test_what_threads_write_is_what_the_batch_holds() -> None:
    batch = filled(3).batch(())
    assert batch.images.shape == (3, 4, 4, 3)
    assert batch.images.dtype == torch.uint8
    assert batch.labels.dtype == torch.int64
    assert batch.images[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert batch.labels.tolist() == [0, 10, 20]
    assert len(batch) == 3


def test_dropped_rows_are_gone() -> None:
    corrupt = (CorruptSample(7, "x", "y"),)
    batch = filled(4).batch(corrupt, [0, 2])
    assert batch.images[:, 3, 3, 2].tolist() == [1, 3]
    assert batch.labels.tolist() == [10, 30]
    assert batch.corrupt == corrupt
    assert len(filled(2).batch((), [0, 1])) == 0


def test_frozen() -> None:
    batch = Batch(torch.zeros(1), torch.zeros(1))
    with pytest.raises(AttributeError):
        batch.labels = torch.ones(1)  # type: ignore[misc]


def test_pinning_for_torchs_loader_keeps_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    batch = filled(2).batch((CorruptSample(7, "x", "y"),))
    # torch's own function, which passes over what has no such method.
    again = torch.utils.data._utils.pin_memory.pin_memory(batch)
    assert again == batch
    assert [part.dtype for part in pinned] == [torch.uint8, torch.int64]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned() -> None:
    batch = BatchBuffer(2, image_size=4, channels=1, pin_memory=True).batch(())
    assert batch.images.is_pinned()
    assert batch.labels.is_pinned()
