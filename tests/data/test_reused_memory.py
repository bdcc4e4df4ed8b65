from __future__ import annotations

import threading

import torch

from paceline.data.reused_memory import ReusedMemory


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
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0] * 4


def test_no_more_blocks_are_kept_than_asked_for() -> None:
    memory = ReusedMemory(1)
    tensors = [memory.take((1024,), torch.uint8) for _ in range(3)]
    places = {tensor.data_ptr() for tensor in tensors}
    assert len(places) == 3
    first = tensors[0].data_ptr()
    del tensors
    kept = memory.take((1024,), torch.uint8)
    assert kept.data_ptr() == first


def test_threads_never_share_a_block() -> None:
    memory, wrong = ReusedMemory(8), []

    def work(number: int) -> None:
        for _ in range(300):
            tensor = memory.take((256,), torch.uint8).fill_(number)
            if not bool((tensor == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
