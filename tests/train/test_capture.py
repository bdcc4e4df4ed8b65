"""CUDA graphs of the step, without a GPU: when they are captured, replayed and given back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import CommSettings
from paceline.comm.planned_transport import ThreadTransport
from paceline.core.errors import RunError
from paceline.train.micro_step import WARM_CALLS, Captured
from ranks import run_ranks
from train.steps import Made, Net, alone, joined, make_step, weights


class Graph:
    """Counts replays."""

    made: list[Graph]

    def __init__(self) -> None:
        self.replays = 0
        self.made.append(self)

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modes of the captures."""
    modes: list[str] = []

    @contextmanager
    def capture(graph: Graph, pool: object, capture_error_mode: str) -> Iterator[None]:
        modes.append(capture_error_mode)
        yield

    Graph.made = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return modes


def test_it_warms_up_captures_once_and_replays(captures: list[str]) -> None:
    calls: list[bool] = []
    captured = Captured(lambda: calls.append(captured.replays), enabled=True)
    for _ in range(WARM_CALLS):
        captured()
        assert not captured.replays
    assert captured.captures
    captured()
    assert captured.replays
    # Other threads may copy meanwhile: the loader's do.
    assert captures == ["thread_local"]
    assert calls == [False] * (WARM_CALLS + 1)
    (graph,) = Graph.made
    assert graph.replays == 1, "a capture computes nothing: it must be replayed at once"
    captured()
    assert (graph.replays, len(calls)) == (2, WARM_CALLS + 1)


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (RuntimeError("not allowed"), RunError, r"\(not allowed\); use --set run.cuda_graphs=off"),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, "out of memory"),
    ],
)
def test_what_fails_during_a_capture_is_not_replayed(
    captures: list[str], error: Exception, raised: type[Exception], message: str
) -> None:
    def fail() -> None:
        if captures:
            raise error

    captured = Captured(fail, enabled=True)
    for _ in range(WARM_CALLS):
        captured()
    with pytest.raises(raised, match=message):
        captured()
    assert not captured.replays


class Graphs:
    """Notes which graph of a micro-step is asked for; computes nothing."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def run(self, *batch: object, sends: bool) -> None:
        self.log.append("graph that sends" if sends else "graph")


@pytest.mark.parametrize(
    ("overlap", "capturable", "expected"),
    [
        ("auto", True, ["graph", "graph", "graph that sends"]),
        ("auto", False, ["graph", "graph", "graph"]),
        ("on", False, ["graph", "graph", "sends, not captured"]),
    ],
)
def test_the_last_micro_step_is_captured_where_its_transport_can_be(
    monkeypatch: pytest.MonkeyPatch, overlap: str, capturable: bool, expected: list[str]
) -> None:
    monkeypatch.setattr(ThreadTransport, "capturable", capturable)
    comm = CommSettings(algorithm="ring", fusion_mib=0.0, overlap=overlap)
    step = make_step(alone(), made=Made(4, graphs=True, comm=comm))
    log: list[str] = []
    step.micro._captured = Graphs(log)  # type: ignore[assignment]
    arm = step.exchange.arm

    def note() -> None:
        log.append("sends, not captured")
        arm()

    monkeypatch.setattr(step.exchange, "arm", note)
    step.run(0, 0.1)
    assert log == expected
    step.exchange.close()


class Uncapturable(Net):
    """Waits for the device, which no capture allows, after it has replaced a buffer."""

    capturing = False
    seen: Tensor

    def forward(self, images: Tensor) -> Tensor:
        self.seen = self.seen + 1
        if self.capturing:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return super().forward(images)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Uncapturable:
    torch.manual_seed(3)
    net = Uncapturable(dropout=0.3)
    net.register_buffer("seen", torch.zeros(()))

    @contextmanager
    def capture(graph: Graph, **settings: object) -> Iterator[None]:
        net.capturing = True
        try:
            yield
        finally:
            net.capturing = False

    Graph.made = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    for name in ("graph_pool_handle", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    return net


def test_what_cannot_be_captured_goes_on_uncaptured_with_the_same_bits(
    failing: Uncapturable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three micro-steps, the last of which sends buckets, fail to be captured in the middle of a step."""
    monkeypatch.setattr(ThreadTransport, "capturable", True)
    comm = CommSettings(algorithm="ring", fusion_mib=0.0)
    found = []
    for graphs in (True, False):
        made = Made(4, epochs=2, graphs=graphs, comm=comm)
        step = make_step(alone(), model=copy.deepcopy(failing), made=made)
        monkeypatch.setattr(step.micro, "may_fall_back", graphs)
        if graphs:
            failing_forward(step.model, failing)
        for number in range(step.plan.total_steps):
            outcome = step.run(number, 0.1)
            assert outcome.done
            assert not outcome.skipped
        assert bool(step.micro.uncaptured) is graphs
        assert "not permitted when stream is capturing)" in step.micro.uncaptured or not graphs
        found.append(torch.cat([weights(step), step.model.get_buffer("seen")[None]]))
        step.exchange.close()
    assert torch.equal(*found)


def failing_forward(model: nn.Module, switch: Uncapturable) -> None:
    """`model`, a copy of `switch`, fails when that one is being captured."""

    def check(*_: object) -> None:
        model.capturing = switch.capturing  # type: ignore[assignment]

    model.register_forward_pre_hook(check)


def test_with_graphs_on_it_is_an_error(failing: Uncapturable) -> None:
    step = make_step(alone(), model=failing, made=Made(4, graphs=True))
    with pytest.raises(RunError, match="could not be captured.*use --set run.cuda_graphs=off"):
        step.run(0, 0.1)


def _agree_again(rank: int) -> list[str]:
    """The second rank's capture fails after the shares of the batch have changed."""
    with joined() as group:
        step = make_step(group, 6, made=Made(6, epochs=4))
        step.micro.may_fall_back = True
        found = []
        for number in range(step.plan.total_steps):
            if number == 5:
                step.drop_graphs()
                step.micro.uncaptured = "a later capture failed here" if rank == 1 else ""
            step.run(number, 0.1)
            found.append(step.micro.uncaptured)
        return found


def test_ranks_agree_on_graphs_again_where_all_have_dropped_theirs() -> None:
    first, second = run_ranks(2, _agree_again)
    assert len(first) >= 9
    assert not any(first[:8])
    assert "another rank" in first[8]
    assert second[8] == "a later capture failed here"
