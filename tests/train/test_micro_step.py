"""What a micro-step holds on to, and what a step's time is made of."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from paceline.bench.step import StepRow
from paceline.bench.step import build_step as build
from paceline.comm.hybrid_carrier import HybridCarrier
from paceline.comm.settings import CommSettings
from train.steps import Made, alone, make_step


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
    graphs = SimpleNamespace(release=lambda: calls.append("release"))
    step.micro._recorded = graphs  # type: ignore[assignment]
    step.launch(0, 0.1)  # recordings are off on a CPU, so every batch counts as short
    assert step.micro._recorded is None
    assert calls == ["wait", "release", "free"]
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


class Recorded:
    """Notes whether a recording was asked for with its collectives; computes nothing."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def run(self, *batch: object, armed: bool) -> None:
        self.log.append("armed recording" if armed else "recording")


@pytest.mark.parametrize(
    ("overlap", "recordable", "expected"),
    [
        ("auto", True, ["recording", "recording", "armed recording"]),
        ("auto", False, ["recording", "recording", "recording"]),
        ("on", False, ["recording", "recording", "armed, not recorded"]),
    ],
)
def test_the_last_micro_step_is_recorded_where_its_carrier_can_be(
    monkeypatch: pytest.MonkeyPatch, overlap: str, recordable: bool, expected: list[str]
) -> None:
    monkeypatch.setattr(HybridCarrier, "recordable", recordable)
    comm = CommSettings(algorithm="ring", fusion_mib=0.0, overlap=overlap)
    step = make_step(alone(), made=Made(4, graphs=True, comm=comm))
    log: list[str] = []
    step.micro._recorded = Recorded(log)  # type: ignore[assignment]
    arm = step.exchange.arm

    def note() -> None:
        log.append("armed, not recorded")
        arm()

    monkeypatch.setattr(step.exchange, "arm", note)
    step.launch(0, 0.1)
    assert log == expected
    step.collect()
    step.exchange.carrier.close()
