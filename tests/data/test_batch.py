from __future__ import annotations

from functools import partial

import pytest
import torch

from data.small import in_threads
from paceline.data.batch import BatchBuffer, ReusedMemory


def filled(samples: int) -> BatchBuffer:
    buffer = BatchBuffer(samples, image_size=4, channels=3, pin_memory=False)
    for i in range(samples):
        buffer.images[i], buffer.labels[i] = i, 10 * i
    return buffer


def test_dropped_rows_are_gone() -> None:
    batch = filled(4).batch([0, 2])
    assert batch.images[:, 3, 3, 2].tolist() == [1, 3]
    assert batch.labels.tolist() == [10, 30]
    assert len(filled(2).batch([0, 1])) == 0


def test_pinning_for_torchs_loader_keeps_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    batch = filled(2).batch()
    # torch's own function, which passes over what has no such method.
    again = torch.utils.data._utils.pin_memory.pin_memory(batch)
    assert again == batch
    assert [part.dtype for part in pinned] == [torch.uint8, torch.int64]


@pytest.mark.gpu
def test_pinned() -> None:
    batch = BatchBuffer(2, image_size=4, channels=1, pin_memory=True).batch()
    assert batch.images.is_pinned()
    assert batch.labels.is_pinned()


def test_memory_that_nobody_holds_is_taken_again() -> None:
    memory = ReusedMemory(4)
    first = memory.take((2, 3), torch.float32)
    place = first.data_ptr()
    del first
    again = memory.take((3, 2), torch.float32)  # the bytes count, not the shape
    assert again.data_ptr() == place
    assert again.shape == (3, 2)
    assert again.dtype == torch.float32


def test_memory_in_use_is_left_alone_also_through_a_view_and_autograd() -> None:
    memory = ReusedMemory(8)
    held = memory.take((4,), torch.float32)
    view = memory.take((4,), torch.float32)[1:]
    saved = memory.take((4,), torch.float32).fill_(3.0)
    weight = torch.ones(4, requires_grad=True)
    product = (weight * saved).sum()
    del saved
    fresh = memory.take((4,), torch.float32).fill_(7.0)
    assert fresh.data_ptr() not in {held.data_ptr(), view.data_ptr() - 4}
    product.backward()
    assert weight.grad.tolist() == [3.0] * 4


def test_threads_never_share_a_block() -> None:
    memory, wrong = ReusedMemory(8), []

    def work(number: int) -> None:
        for _ in range(300):
            tensor = memory.take((256,), torch.uint8).fill_(number)
            if not bool((tensor == number).all()):
                wrong.append(number)

    in_threads(*(partial(work, number) for number in range(4)))
    assert wrong == []
