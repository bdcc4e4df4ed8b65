"""The start-up of a run: which communicators a plan uses, and their cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.plan.plan_file import PlanFile
from paceline.plan.schedules import parts_used
from paceline.plan.steps import Groups
from paceline.planner.start_up import (
    MOST_NCCL_S,
    PROCESS_S,
    StartUp,
    communicator_s,
)

NODES = Groups.of_nodes([4, 4], nested=True)


@pytest.mark.parametrize(
    ("algorithms", "parts"),
    [
        ({"native"}, set()),
        ({"ring", "tree", "halving_doubling", "native"}, set()),
        ({"native", "hierarchical"}, {"rows", "masters"}),
        ({"torus2d"}, {"rows", "masters", "columns"}),
        ({"all_to_all", "native"}, set()),
        ({"all_to_all", "hierarchical"}, {"rows", "masters"}),
    ],
)
def test_only_what_a_schedule_sums_in_is_made(algorithms: set[str], parts: set[str]) -> None:
    assert parts_used(algorithms, NODES) == parts
    assert parts_used(algorithms, Groups.of_nodes([4, 4])) == set(), "messages need no sub-group"


@pytest.mark.parametrize(
    ("algorithms", "buckets", "sizes"),
    [
        ({"ring"}, 2, [64, 64]),
        ({"hierarchical"}, 2, [64, 64, 8, 8]),
        ({"torus2d"}, 2, [64, 64, 8, 8]),
        ({"native"}, 1, [64]),
    ],
)
def test_a_rank_creates_the_communicators_of_the_plan(
    algorithms: set[str], buckets: int, sizes: list[int]
) -> None:
    found = StartUp.of(8, 8, algorithms, buckets=buckets)
    assert found.backend_s == pytest.approx(sum(map(communicator_s, sizes)))
    assert StartUp.of(1, 1, {"native"}).backend_s == 0.0


def test_more_ranks_and_more_groups_take_longer() -> None:
    few, many = (StartUp.of(nodes, 8, {"ring"}) for nodes in (2, 64))
    assert few.meet_s < many.meet_s
    assert few.agree_s < many.agree_s
    assert few.backend_s < many.backend_s < StartUp.of(64, 8, {"torus2d"}).backend_s
    parts = PROCESS_S + many.meet_s + many.agree_s + many.backend_s
    assert many.total_s == pytest.approx(parts)
    assert "NCCL" in many.describe()
    assert "NCCL" not in StartUp.of(64, 8, {"ring"}, nccl=False).describe()


def test_the_line_of_nccl_ends_at_what_was_reported() -> None:
    """A line through 8 and 32 ranks would reach 12 minutes for one communicator of 8,192 ranks. The limit
    is that of a whole initialization, with all communicators."""
    times = [communicator_s(ranks) for ranks in (8, 32)]
    assert times == pytest.approx([16.3 / 8, 130 / 32], rel=0.05)
    assert StartUp.of(100, 8, {"ring"}).backend_s == 2 * communicator_s(800) < MOST_NCCL_S
    for used in ({"native"}, {"ring"}, {"torus2d"}):
        assert StartUp.of(1024, 8, used).backend_s == MOST_NCCL_S


def test_a_plan_file_keeps_it(tmp_path: Path) -> None:
    found = StartUp.of(4, 8, {"torus2d"})
    PlanFile(start_up=found.to_table()).write(tmp_path / "plan.toml")
    assert PlanFile.read(tmp_path / "plan.toml").start_up == found.to_table()
