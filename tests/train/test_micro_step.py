"""What a micro-step holds on to, and what a step's time is made of."""

from __future__ import annotations

import time

import pytest
import torch

from paceline.bench.our_step import build
from paceline.bench.step_row import StepRow
from train.steps import alone, make_step


def test_steps_collected_in_one_go_share_the_time_by_their_launches() -> None:
    step = make_step(alone())
    step.launch(0, 0.1)
    time.sleep(0.1)
    step.launch(1, 0.1)
    first, second = step.collect(), step.collect()
    assert first.step_s >= 0.1  # up to the second's launch, though both were done long before
    assert 0 < second.step_s < first.step_s


def test_a_short_batch_gives_the_memory_of_a_recording_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("free"))
    step = make_step(alone())
    step.micro._recorded = object()  # type: ignore[assignment]
    step.launch(0, 0.1)  # recordings are off on a CPU, so every batch counts as short
    assert step.micro._recorded is None
    assert calls == ["wait", "free"]
    step.collect()


@pytest.mark.parametrize("nhwc", [True, False])
def test_maps_lie_as_the_switch_says(nhwc: bool) -> None:
    row = StepRow("ours", "ours", "resnet_tiny", 4, 28, 5, "cpu", 1, 1, {"run.channels_last": nhwc})
    step, words = build(row, alone())
    orders: list[bool] = []
    step.model.conv1.register_forward_hook(  # type: ignore[operator, union-attr]
        lambda module, given, out: orders.append(
            out.is_contiguous(memory_format=torch.channels_last)
        )
    )
    step.run(0, 0.1)
    assert orders == [nhwc]
    assert ("NHWC" if nhwc else "NCHW") in words
