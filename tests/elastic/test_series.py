"""Trainings that lose ranks: at ordinary points, together with their host, and during recovery."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.control_plane import agreement_s
from elastic.series import Loss, Plan, planned, reference_weights, run_job
from fork_server import ForkServer, shared_server


@pytest.fixture(scope="module")
def server() -> ForkServer:
    return shared_server()


@pytest.fixture(scope="module")
def plan(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return planned(server, tmp_path_factory.mktemp("plan") / "job")


@pytest.mark.parametrize(
    ("ranks", "losses", "at"),
    [
        (3, [Loss(1, "reducing", 6), Loss(2, "regrouping", 1)], ["reducing", "regrouping"]),
        (4, [Loss(3, "reduced", 4, behind=0), Loss(1, "serving", 1)], ["reduced", "serving"]),
        (4, [Loss(2, "computing", 5, (3,)), Loss(1, "finishing", 1)],
         ["computing", "computing", "finishing"]),
    ],
)  # fmt: skip
def test_lost_ranks_change_nothing_but_the_number_of_ranks(
    ranks: int, losses: list[Loss], at: list[str], server: ForkServer, plan: Plan, tmp_path: Path
) -> None:
    result = run_job(server, ranks, losses, tmp_path / "job", plan)
    assert result.violations == []
    assert result.lost_at == at
    expected = reference_weights(result.generations, ranks, tmp_path / "reference")
    assert result.weights == expected


def test_many_survivors_agree() -> None:
    assert len(agreement_s(32, lost=2)) == 30
