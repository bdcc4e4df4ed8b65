"""The arithmetic of the probe, with scripted ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.tune import tuner as module
from paceline.tune.tuner import hidden_cost


class Clock:
    """Time passes by work alone: a piece takes 1 ms, or 1.5 beside an exchange; that takes 20 ms alone,
    and ends after 20 pieces."""

    def __init__(self) -> None:
        self.now, self.under_way, self.pieces, self.sent = 0.0, False, 0, 0

    def compute(self, pieces: int) -> None:
        self.now += pieces * (1.5e-3 if self.under_way else 1e-3)
        self.pieces += pieces

    def send(self) -> Any:
        self.under_way, begun = True, self.pieces
        self.sent += 1

        def wait() -> None:
            if self.pieces == begun:  # nothing was done beside it
                self.now += 0.02
            self.under_way = False

        return SimpleNamespace(is_completed=lambda: self.pieces >= begun + 20, wait=wait)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Clock]:
    clock = Clock()

    def timed(work: Callable[[], object]) -> float:
        begun = clock.now
        work()
        return clock.now - begun

    monkeypatch.setattr(
        module._HiddenCostProbe, "_compute", lambda self, pieces: clock.compute(pieces)
    )
    monkeypatch.setattr(module._HiddenCostProbe, "_send", lambda self: clock.send())
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(module.dist, "all_reduce", lambda mean: mean.mul_(2))
    group = SimpleNamespace(completed=lambda words, work: work())
    found = SimpleNamespace(
        device=torch.device("cpu"), size=2, group=group, timed=timed, barrier=lambda: None,
        slowest=lambda seconds: seconds,
    )  # fmt: skip
    return found, clock


def test_what_the_compute_lost_over_what_the_exchanges_take(ranks: tuple[Any, Clock]) -> None:
    """Each exchange comes with 20 pieces, which lose 0.5 ms each: 10 ms of its 20."""
    assert hidden_cost(ranks[0]) == pytest.approx(0.5)
    assert ranks[1].sent == 1 + (module._ROUNDS + 1) + module._ROUNDS * module._MOST


def test_not_where_it_would_take_too_long(
    ranks: tuple[Any, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LONGEST_S", 0.01)
    assert hidden_cost(ranks[0]) is None
    assert ranks[1].sent == 1


def test_neither_alone_nor_on_a_gpu(ranks: tuple[Any, Clock]) -> None:
    alone, gpu = dict(vars(ranks[0])), dict(vars(ranks[0]))
    assert hidden_cost(SimpleNamespace(**{**alone, "size": 1})) is None
    assert hidden_cost(SimpleNamespace(**{**gpu, "device": torch.device("cuda", 0)})) is None
