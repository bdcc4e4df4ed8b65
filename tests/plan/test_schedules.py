"""Every schedule in one process, with whole numbers."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque

import numpy as np
import pytest

from paceline.core.errors import ConfigError
from paceline.plan.schedules import (
    FLOOD_BYTES,
    algorithm,
    algorithm_names,
    check_name,
    tuned_names,
)
from paceline.plan.steps import Groups, Receive, Rounds, Segment, Send, cut, interleave

SCHEDULED = algorithm_names()[1:]
LAYOUTS = [(2,), (1, 1), (3,), (2, 2), (3, 2, 1), (1, 4), (2, 9), (1,) * 9, (10, 1), (3,) * 5]


def programs(name: str, nodes: tuple[int, ...], segment: Segment) -> list[Rounds]:
    groups = Groups.of_nodes(nodes)
    return [algorithm(name).rounds(rank, groups, segment) for rank in groups.order]


def run(rounds: list[Rounds], length: int) -> list[np.ndarray]:
    """Delivers messages as early as possible: one that replaces a span is written when it is sent."""
    draw = np.random.default_rng(0)
    own = [draw.integers(-99, 99, length) for _ in rounds]
    total, left = sum(own), [deque(s for steps in r for s in steps) for r in rounds]
    waiting = [deque(s for s in steps if isinstance(s, Receive)) for steps in left]
    posted: dict[tuple[int, int], deque[Receive]] = defaultdict(deque)
    for rank, receives in enumerate(waiting):
        for step in receives:
            for peer in step.peers:
                posted[peer, rank].append(step)
    inbox: dict[tuple[int, int], deque[np.ndarray]] = defaultdict(deque)
    progress = True
    while progress:
        progress = False
        for rank, steps in enumerate(left):
            while steps:
                step = steps[0]
                if isinstance(step, Send):
                    low, high = step.span
                    expected = posted[rank, step.peer].popleft()
                    assert expected.span == step.span, "the same messages in the same order"
                    if not expected.add:
                        own[step.peer][low:high] = own[rank][low:high]
                    inbox[rank, step.peer].append(own[rank][low:high].copy())
                elif isinstance(step, Receive):
                    if not all(inbox[peer, rank] for peer in step.peers):
                        break
                    for peer in step.peers:
                        arrived = inbox[peer, rank].popleft()
                        if step.add:
                            own[rank][slice(*step.span)] += arrived
                steps.popleft()
                progress = True
    assert not any(left), "a rank waits for ever"
    assert not any(posted.values())
    assert all((one == total).all() for one in own)
    return own


@pytest.mark.parametrize("name", SCHEDULED)
@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
def test_every_rank_ends_with_the_sum(name: str, nodes: tuple[int, ...]) -> None:
    """Sizes for every way to sum among masters and columns: flood, exchange, halving, ring."""
    for length, number in ((1, 0), (7, 1), (1000, 2), (9000, 0), (40_000, 1)):
        run(programs(name, nodes, Segment(length, 4, number)), length)
    run(programs(name, nodes, Segment(300, 8192, 0)), 300)


@pytest.mark.parametrize("name", SCHEDULED)
@pytest.mark.parametrize("nodes", LAYOUTS, ids=str)
def test_rounds_come_out_even_and_wait_for_no_later_one(name: str, nodes: tuple[int, ...]) -> None:
    for segment in (Segment(1000), Segment(40_000), Segment(3, 4, 1), Segment(300, 8192, 1)):
        found = programs(name, nodes, segment)
        # A rank may have nothing to do in the last rounds, but all have as many.
        assert len({len(rounds) for rounds in found}) == 1
        sent: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        for rank, rounds in enumerate(found):
            for number, steps in enumerate(rounds):
                for step in steps:
                    if isinstance(step, Send):
                        sent[rank, step.peer].append(number)
        for rank, rounds in enumerate(found):
            for number, steps in enumerate(rounds):
                for step in steps:
                    for peer in step.peers if isinstance(step, Receive) else ():
                        assert sent[peer, rank].popleft() <= number
        assert not any(sent.values())


@pytest.mark.parametrize("masters", [2, 3, 4, 8])
def test_masters_send_everything_to_everybody_up_to_a_limit_for_all_messages(masters: int) -> None:
    """The limit is of what a master sends and receives in that one round."""

    def floods(elements: int) -> bool:
        every = programs("hierarchical", (1,) * masters, Segment(elements, 4, 0))
        sent = [step for rounds in every for steps in rounds for step in steps
                if isinstance(step, Send)]  # fmt: skip
        return all(step.span == (0, elements) for step in sent)

    most = FLOOD_BYTES // (masters - 1) // 4
    assert floods(most)
    assert not floods(most + 1)


def test_masters_take_turns() -> None:
    groups = Groups.of_nodes((2, 2))

    def masters(number: int) -> set[int]:
        crossing = set()
        for rank in range(4):
            for steps in algorithm("hierarchical").rounds(rank, groups, Segment(9, 4, number)):
                sends = [step for step in steps if isinstance(step, Send)]
                crossing |= {rank for step in sends if step.peer // 2 != rank // 2}
        return crossing

    assert [masters(number) for number in range(3)] == [{0, 2}, {1, 3}, {0, 2}]


@pytest.mark.parametrize(("length", "parts"), [(0, 3), (1, 4), (7, 3), (4097, 16), (8, 8)])
def test_cuts_cover_everything_once(length: int, parts: int) -> None:
    cuts = cut((5, 5 + length), parts)
    assert [at for low, high in cuts for at in range(low, high)] == list(range(5, 5 + length))
    assert max(high - low for low, high in cuts) - min(high - low for low, high in cuts) <= 1


def test_segments_run_behind_one_another() -> None:
    log = list(interleave([3] * 5, 2))
    assert sorted((segment, number) for segment, _, number in log) == list(
        itertools.product(range(5), range(3))
    )
    order = [(segment, number) for segment, _, number in log]
    assert order.index((1, 0)) < order.index((0, 2)) < order.index((2, 0))
    assert {lane for _, lane, _ in log} == {0, 1}
    assert algorithm("ring").segments(2**20, 4) == cut((0, 2**20), 2)
    assert len(algorithm("ring").segments(2**24, 4)) == 8
    assert len(algorithm("ring").segments(1000, 4)) == 1


def test_names() -> None:
    assert algorithm_names() == (
        "native", "ring", "hierarchical", "torus2d", "halving_doubling", "tree", "central",
    )  # fmt: skip
    assert set(algorithm_names()) - set(tuned_names()) == {"central"}
    with pytest.raises(ConfigError, match="comm.algorithm = 'rign'.*did you mean 'ring'"):
        check_name("rign")
    with pytest.raises(ConfigError, match="has no schedule"):
        algorithm("native")
