"""Spans of a window of steps, and offsets between the ranks' clocks."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cli_runs import events, run_two, small
from comm.exchanges import CPU, joined
from paceline.comm import Timeline
from paceline.comm.tracing import clock_offsets, measure_offsets
from ranks import run_ranks


def record(timeline: Timeline, step: int) -> None:
    timeline.step_begun(step)
    with timeline.span("data", host=True):
        pass
    with timeline.span("forward and backward"):
        timeline.sent(0)
        timeline.begun(0)
        timeline.sent(1)
        timeline.ended(0)
    timeline.begun(1)
    if step != 2:
        timeline.ended(1)
    timeline.step_ended(0.0)


def test_only_the_window_is_recorded() -> None:
    timeline = Timeline(2, 3, CPU)
    before = time.perf_counter()
    for step in range(5):
        record(timeline, step)
    after = time.perf_counter()
    spans = timeline.spans()
    assert {span.step for span in spans} == {2, 3}
    for span in spans:
        assert before <= span.start_s <= span.stop_s <= after
    second = [(s.name, s.track, s.bucket) for s in spans if s.step == 2]
    assert sorted(second) == [
        ("bucket", "exchange", 0), ("bucket", "exchange", 1), ("data", "compute", -1),
        ("forward and backward", "compute", -1), ("sent", "compute", 0), ("sent", "compute", 1),
    ]  # fmt: skip
    # What never ended is no span, and does not end in a later step either.
    assert [s.bucket for s in spans if s.step == 3 and s.name == "bucket"] == [0]


@pytest.mark.gpu
def test_the_devices_times_lie_on_the_hosts_clock() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda")
    timeline = Timeline(1, 1, device)
    timeline.step_begun(0)
    torch.cuda.synchronize()
    before = time.perf_counter()
    with timeline.span("sleep"):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    spans = {span.track: span for span in timeline.spans()}
    compute, host = spans["compute"], spans["host"]
    # The host only launches the kernel, and goes on before it has ended.
    assert before - 1e-3 <= compute.start_s
    assert host.stop_s < compute.stop_s <= time.perf_counter() + 1e-3


@given(
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=4),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_the_true_offset_is_within_the_residual(
    offsets: list[float], rounds: list[tuple[float, float]], random: Any
) -> None:
    offsets = [0.0, *offsets]
    rows: list[list[float]] = [[] for _ in offsets]
    now = 0.0
    for early, late in rounds:
        enters = [now + early * random.random() for _ in offsets]
        met = max(enters)
        leaves = [met + late * random.random() for _ in offsets]
        for row, offset, enter, leave in zip(rows, offsets, enters, leaves, strict=True):
            row += [enter + offset, leave + offset]
        now = max(leaves)
    for found, true in zip(clock_offsets(rows), offsets, strict=True):
        assert abs(found.offset_s - true) <= found.residual_s + 1e-9


def _measure(rank: int) -> list[tuple[float, float]] | None:
    with joined() as group:
        return measure_offsets(group)


def test_ranks_on_one_machine_have_one_clock() -> None:
    found = run_ranks(3, _measure)
    assert found[1:] == [None, None]
    assert len(found[0]) == 3
    for offset_s, residual_s in found[0]:
        assert abs(offset_s) <= residual_s + 1e-9


def _slow_end_of_backward() -> None:
    """The last gradient of steps 3 to 5 takes its time, so that the communication thread gets a core
    before it, however busy the host is."""
    from paceline.models.resnet import SmallResNet

    real, passes = SmallResNet.forward, itertools.count()

    def forward(self: SmallResNet, images: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and 4 <= next(passes) < 10:  # two of each step
            images = images.detach().requires_grad_()
            images.register_hook(lambda gradient: time.sleep(0.4))
        return real(self, images)

    SmallResNet.forward = forward  # type: ignore[method-assign]


def test_a_run_writes_one_trace_of_all_ranks(tmp_path: Any) -> None:
    arguments = small(
        "--output", "run", "-b", "4", "--set", "run.traced_steps=[3, 4]", "--epochs", "1",
        "--set", "comm.algorithm=ring", "--set", "comm.fusion_mib=0.5",
    )  # fmt: skip
    done = run_two(arguments, tmp_path, [_slow_end_of_backward] * 2)
    assert [rank.code for rank in done] == [0, 0]
    document = json.loads((tmp_path / "run/trace.json").read_text())
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    for rank in (0, 1):
        own = [event for event in spans if event["pid"] == rank]
        assert {event["args"]["step"] for event in own} == {3, 4}
        names = [event["name"] for event in own if event["cat"] == "compute"]
        # Two micro-steps a step.
        assert [names.count(n) for n in ("data", "forward and backward")] == [4, 4]
        assert [names.count(n) for n in ("exposed exchange", "update")] == [2, 2]
        buckets = [event for event in own if event["cat"] == "exchange"]
        first = min(buckets, key=lambda event: event["ts"])
        assert first["name"].startswith("bucket 1, ")
        assert first["name"].endswith(" KiB, ring")
        assert first["args"]["first"] == "fc.bias"
        # Overlapped: it leaves before the backward pass of its step is over.
        backward = [e for e in own if e["name"] == "forward and backward"][1]
        assert first["ts"] < backward["ts"] + backward["dur"]
    notes = [record["text"] for record in events(tmp_path / "run", "note")]
    assert any(note.startswith("trace of 2 ranks in run/trace.json, clocks") for note in notes)
    assert all(step["exposed_comm_s"] > 0 for step in events(tmp_path / "run", "step", rank=1))
