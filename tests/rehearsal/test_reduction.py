"""The order of additions of a schedule, computed without messages."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.plan.schedules import algorithm_names
from paceline.plan.steps import Groups
from paceline.rehearsal.reduction import HELD, ROW, Plane, Reduction, compile_reduction

CLUSTERS = ((1,), (2,), (3, 3), (2, 2, 2, 2), (4, 1), (5,))


def reduced(reduction: Reduction, rows: list[list[object]]) -> list[object]:
    """Executes a reduction on rows of any objects that can be added, in the order of the reduction."""
    planes: dict[Plane, dict[int, object]] = {}
    for row, instructions in zip(rows, reduction.arrivals, strict=True):
        for into, term, first, adds, start, stop in instructions:
            for at in range(start, stop):
                value = row[at] if term[0] == ROW else planes[term][at]
                if first is not None:
                    left = row[at] if first[0] == ROW else planes[first][at]
                    value = left + value  # type: ignore[operator]
                elif adds:
                    value = planes[into][at] + value  # type: ignore[operator]
                planes.setdefault(into, {})[at] = value
    found: list[object] = [None] * len(rows[0])
    for plane, start, stop in reduction.result:
        for at in range(start, stop):
            found[at] = planes[plane][at]
    return found


@pytest.mark.parametrize("name", algorithm_names())
@pytest.mark.parametrize("nodes", CLUSTERS)
def test_every_rank_is_added_once_whatever_the_order(name: str, nodes: tuple[int, ...]) -> None:
    groups, ranks = Groups.of_nodes(nodes), sum(nodes)
    for length in (1, 3, 64, 1000):
        for order in (
            range(ranks),
            range(ranks - 1, -1, -1),
            np.random.default_rng(0).permutation(ranks),
        ):
            numbers = [int(rank) for rank in order]
            reduction = compile_reduction(name, groups, length, 2, order=numbers)
            # Powers of a large base: a sum shows how often each rank is in it.
            rows: list[list[object]] = [[100**rank] * length for rank in numbers]
            once = sum(100**rank for rank in range(ranks))
            assert reduced(reduction, rows) == [once] * length, (length, numbers)


def test_a_tree_keeps_few_rows_and_a_ring_half_of_them() -> None:
    groups = Groups.of_nodes([8] * 8)
    copies = {}
    for name in ("ring", "tree", "hierarchical", "native"):
        order = range(63, -1, -1) if name == "native" else range(64)
        found = compile_reduction(name, groups, 64_000, 4, order=order)
        copies[name] = sum(stop - start for start, stop in found.planes.values()) / 64_000
    assert copies["tree"] < 16
    assert copies["hierarchical"] < 24
    assert 28 < copies["ring"] < 36
    assert 28 < copies["native"] < 36


def test_the_rows_of_a_ring_are_added_in_long_stretches() -> None:
    """A ring over p ranks has p² additions of a chunk; neighbours in memory are one instruction."""
    found = compile_reduction("ring", Groups.of_nodes([64]), 64_000, 4, order=range(64))
    assert sum(map(len, found.arrivals)) < 12 * 64


def test_a_process_alone_keeps_its_row() -> None:
    found = compile_reduction("ring", Groups(((0,),)), 10, 4, order=[0])
    assert found.result == (((HELD, 0), 0, 10),)


def test_a_schedule_of_16_bits_rounds_where_it_sends() -> None:
    """Halving keeps sums in fp32 for as long as a rank keeps them."""
    groups = Groups.of_nodes([4])
    half = compile_reduction("halving_doubling", groups, 64, 2, order=range(4))
    full = compile_reduction("halving_doubling", groups, 64, 4, order=range(4))
    assert any(plane[0] == "wide" for plane in half.planes)
    assert not any(plane[0] == "wide" for plane in full.planes)
