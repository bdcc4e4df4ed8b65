from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from paceline.core.errors import RunError
from paceline.train.captured import WARM_CALLS, Captured


class Graph:
    """Counts replays, as a recording without a GPU."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modes of the recordings that were made."""
    modes: list[str] = []

    @contextmanager
    def record(graph: Graph, pool: object, capture_error_mode: str) -> Iterator[None]:
        modes.append(capture_error_mode)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    return modes


def test_without_recordings_it_is_the_function(recordings: list[str]) -> None:
    calls: list[int] = []
    captured = Captured(lambda: calls.append(1), enabled=False)
    for _ in range(5):
        captured()
    assert len(calls) == 5
    assert not captured.replays
    assert recordings == []


def test_it_warms_up_records_once_and_replays(recordings: list[str]) -> None:
    calls: list[bool] = []
    captured = Captured(lambda: calls.append(captured.replays), enabled=True)
    for _ in range(WARM_CALLS):
        captured()
        assert not captured.replays
    captured()
    assert captured.replays
    # Other threads may copy meanwhile: the loader's do.
    assert recordings == ["thread_local"]
    assert calls == [False] * (WARM_CALLS + 1)
    graph = captured._graph
    assert isinstance(graph, Graph)
    assert graph.replays == 1, "a recording computes nothing: it must be replayed at once"
    captured()
    captured()
    assert graph.replays == 3
    assert len(calls) == WARM_CALLS + 1


def test_what_fails_while_it_is_recorded_is_not_replayed(recordings: list[str]) -> None:
    def fail() -> None:
        raise RuntimeError("not allowed in a recording")

    captured = Captured(fail, enabled=True)
    captured._left = 0
    with pytest.raises(
        RunError, match=r"\(not allowed in a recording\); use --set run.cuda_graphs=off"
    ):
        captured()
    assert not captured.replays


def test_memory_that_runs_out_while_it_is_recorded_stays_what_it_is(recordings: list[str]) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    captured = Captured(fail, enabled=True)
    captured._left = 0
    with pytest.raises(torch.OutOfMemoryError):
        captured()
