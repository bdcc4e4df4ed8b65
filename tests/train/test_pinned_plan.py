from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.config import RunConfig
from paceline.core.errors import CheckpointError
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.plan_file import ClusterFacts
from paceline.train.exchange_plan import ChosenPlan
from paceline.train.run_state import PinnedPlan
from train.steps import Net

PLAN = FusionPlan.single(("b", "a"))


class Saved:
    """What a checkpoint tells of its plan."""

    def __init__(self, world_size: int = 2, **comm: Any) -> None:
        self.plan, self.world_size = PLAN.to_table(), world_size
        self.config = {"comm": {**RunConfig().to_tables()["comm"], **comm}}


def pinned(saved: Saved, world_size: int = 2, **comm: Any) -> PinnedPlan:
    config = RunConfig().with_values({f"comm.{name}": value for name, value in comm.items()})
    return PinnedPlan.of(saved, config, world_size)  # type: ignore[arg-type]


def test_the_same_settings_and_ranks_keep_the_plan_whole() -> None:
    assert pinned(Saved(algorithm="ring"), algorithm="ring").whole
    assert not pinned(Saved(algorithm="ring"), algorithm="tree").whole
    assert not pinned(Saved(algorithm="ring"), 3, algorithm="ring").whole


@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpoint_of_other_tensors_is_refused_by_name(whole: bool) -> None:
    config = replace(RunConfig().comm, algorithm="native", fusion_mib=0.0)
    with pytest.raises(CheckpointError, match=r"trains other tensors: a, b, conv.bias \(6 in all"):
        ChosenPlan.of(config, Net(), ClusterFacts(1, 1), PinnedPlan(PLAN, whole))
