"""What one rank has otherwise than the others, or cannot do, ends all of them with one line."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import faults
from cli_runs import events, run, run_two, small, summary
from paceline.models.registry import create_model
from paceline.models.settings import ModelSettings
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.plan_file import ClusterFacts, ModelFacts, PlanFile

HYBRID = (
    "--set", "comm.algorithm=hybrid", "--set", "comm.eta_kib=64", "--set", "comm.fusion_mib=0.25",
)  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(
            partial(faults.freeze, "fc.bias"),
            "ranks differ in the trained parameters: ",
            id="parameter-sets",
        ),
        pytest.param(
            partial(faults.other_plan, 1 << 20), "ranks differ in the fusion plan: ", id="plans"
        ),
        pytest.param(
            partial(faults.other_version, "paceline", "0.0.1"),
            "ranks differ in version of paceline: ",
            id="versions-of-paceline",
        ),
        pytest.param(
            partial(faults.other_version, "torch", "2.11.0"),
            "ranks differ in version of torch: ",
            id="versions-of-torch",
        ),
        pytest.param(
            faults.no_memory_for_gradients,
            "rank 1: out of memory with the gradients' buffers on cpu; ",
            id="a-buffer-larger-than-memory",
        ),
    ],
)
def test_a_rank_that_is_unlike_the_others(tmp_path: Path, fault: Any, words: str) -> None:
    done = run_two(small("--output", "run", *HYBRID), tmp_path, [None, fault])
    lines = {rank.error_line() for rank in done}
    assert len(lines) == 1
    assert lines.pop().startswith(words)
    assert not (tmp_path / "run").exists()


def test_a_plan_for_another_model_or_cluster(tmp_path: Path) -> None:
    ranks, model = ClusterFacts(ranks=2, nodes=1), ModelFacts.of([("w", 3)])
    PlanFile(FusionPlan.single(["w"]), model, ranks).write(tmp_path / "plan.toml")
    arguments = small("--output", "run", "--set", "comm.plan=plan.toml")
    for done in run_two(arguments, tmp_path):
        line = done.error_line()
        assert "comm.plan = 'plan.toml': is for a model with 1 tensors of 3 elements (" in line
        assert done.code == 2
    trained = create_model(
        ModelSettings("resnet_tiny"), num_classes=4, in_channels=1, image_size=28
    )
    own = ModelFacts.of((name, p.numel()) for name, p in trained.named_parameters())
    PlanFile(FusionPlan.single(["w"]), own, ranks).write(tmp_path / "plan.toml")
    line = run(arguments, tmp_path).error_line()
    assert (
        "is for a cluster with ranks = 2, nodes = 1, this cluster has ranks = 1, nodes = 1" in line
    )
    assert not (tmp_path / "run").exists()


def test_a_nan_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    # The pass that finds out the order of the gradients comes first.
    fault = partial(faults.poison, 1 + 3, passes=1)
    done = run_two(small("--output", "run", *HYBRID), tmp_path, [None, fault])
    assert [rank.code for rank in done] == [0, 0], done[0].err
    for rank in (0, 1):
        skipped = [e["step"] for e in events(tmp_path / "run", "step", rank) if e["skipped"]]
        assert skipped == [3]
    assert summary(tmp_path / "run")["skipped_steps"] == 1
