"""The planner's messages are those that the communication module really sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm.algorithms import explicit
from paceline.comm.algorithms.catalogue import create_algorithm
from paceline.comm.group_layout import GroupLayout
from paceline.core.errors import ConfigError
from paceline.plan.rank_rounds import Message
from paceline.plan.rank_scripts import SCRIPTED, scripts

EXPLICIT = [name for name in SCRIPTED if name != "native"]


class Recorder:
    """In a lane's place: keeps what is sent and waited for, and waits for nothing."""

    log: list[Message]

    def __init__(self, *_: Any, turn: int = 0, **__: Any) -> None:
        self.turn, self._number, self._part = turn, _[2], 0
        self.batched = False

    def fork(self, part: int) -> Recorder:
        beside = Recorder(None, None, self._number)
        beside._part = part
        return beside

    def scratch(self, name: str, length: int, like: Tensor, dtype: Any = None) -> Tensor:
        return torch.empty(length, dtype=dtype or like.dtype)

    def send(self, tensor: Tensor, to: int) -> None:
        self.note(True, to, tensor)

    def note(self, sent: bool, peer: int, tensor: Tensor) -> None:
        if tensor.numel():
            self.log.append(Message(sent, peer, tensor.numel(), (self._number, self._part)))

    def expect(self, arrivals: Sequence[tuple[Tensor, int]]) -> Waits:
        return Waits(self, arrivals)

    def finish(self) -> None:
        """Nothing is under way."""


class Waits:
    def __init__(self, lane: Recorder, arrivals: Sequence[tuple[Tensor, int]]) -> None:
        self._lane, self._arrivals = lane, arrivals

    def take(self, number: int) -> Tensor:
        tensor, source = self._arrivals[number]
        self._lane.note(False, source, tensor)
        return tensor

    def arrivals(self, first: int = 0, stop: int | None = None) -> Iterator[Tensor]:
        yield from map(self.take, range(len(self._arrivals))[first:stop])

    def take_all(self) -> None:
        list(self.arrivals())


def really_sent(name: str, nodes: int, each: int, size: int, rank: int) -> list[Message]:
    Recorder.log = []
    layout = GroupLayout(tuple(tuple(range(n * each, (n + 1) * each)) for n in range(nodes)))
    groups: Any = SimpleNamespace(
        rank=rank, layout=layout, backend="gloo", world=object(), world_size=nodes * each,
        has_parts=False,
    )  # fmt: skip
    create_algorithm(name, groups).all_reduce(torch.empty(size // 4))
    return Recorder.log


@pytest.mark.parametrize("name", EXPLICIT)
def test_as_the_communication_module_sends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explicit, "Lane", Recorder)
    for nodes, each in ((1, 4), (2, 2), (3, 3), (4, 1), (9, 1), (2, 9)):
        for size in (12, 16 * 1024, 130_000, 3 * 2**20, 19 * 2**20):
            ours = scripts(name, nodes, each, size)
            for rank in range(nodes * each):
                sent = really_sent(name, nodes, each, size, rank)
                assert ours[rank] == sent, (nodes, each, size, rank)


@pytest.mark.parametrize("name", SCRIPTED)
@pytest.mark.parametrize("place", [(1, 2), (3, 3), (4, 2)])
def test_all_that_is_sent_is_waited_for_in_order(name: str, place: tuple[int, int]) -> None:
    found = scripts(name, *place, 5_000_000)
    for a, one in enumerate(found):
        for b, other in enumerate(found):
            lanes = {m.lane for m in one}
            for lane in lanes:
                sent = [m.elements for m in one if m.sent and m.peer == b and m.lane == lane]
                came = [m.elements for m in other if not m.sent and m.peer == a and m.lane == lane]
                assert sent == came
    # Whichever way: nobody can have the sum with less than this coming in.
    arrived = sum(m.elements for one in found for m in one if not m.sent)
    assert arrived >= 2 * (len(found) - 1) * (5_000_000 // 4) * 0.999


def test_one_rank_sends_nothing_and_unknown_names_fail() -> None:
    assert scripts("ring", 1, 1, 1024) == [[]]
    with pytest.raises(ConfigError, match="did you mean 'tree'"):
        scripts("tre", 2, 2, 8)
