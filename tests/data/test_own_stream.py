"""Streams apart from the default one."""

from __future__ import annotations

import pytest
import torch

from paceline.data.on_device.own_stream import apart


def test_on_a_cpu_there_is_nothing_to_do() -> None:
    with apart(torch.device("cpu"), "nvjpeg"):
        assert float(torch.ones(3).sum()) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_training_that_decodes_there_leaves_the_default_stream() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    usual = torch.cuda.current_stream(device)
    with apart(device, "auto"):
        assert torch.cuda.current_stream(device) == usual
    torch.cuda._sleep(100_000_000)
    before = torch.full((1 << 20,), 3.0, device=device)  # behind the sleep
    with apart(device, "nvjpeg"):
        assert torch.cuda.current_stream(device) != usual
        inside = before * 2
        torch.cuda._sleep(100_000_000)
        inside += 1
    assert torch.cuda.current_stream(device) == usual
    # Neither side read before the other had written.
    assert inside.sum().item() == 7 * (1 << 20)
