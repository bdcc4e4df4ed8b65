"""The clock of a rehearsal: the step of the model that is trained, what is left out, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.plan_file import PlanFile
from paceline.plan.rehearsal import ClusterClock, RehearseSettings, cluster_clock
from paceline.plan.workload import Affine
from plan.made import made_workload

PLACE = RehearseSettings(nodes=2, gpus_per_node=2, gpu="H100")


def clock(settings: RehearseSettings = PLACE, **changes: Any) -> ClusterClock:
    given: dict[str, Any] = {"batch": 10, "accumulation": 1, "validation": 40, "eval_batch": 20}
    work = settings.workload("resnet18", 32, 10)
    assert work is not None
    plan = FusionPlan.single(tuple(gradient.name for gradient in work.gradients))
    return cluster_clock(settings, plan, work, **given | changes)


def test_the_step_is_that_of_the_stem() -> None:
    small, other = (PLACE.workload("resnet18", 32, 10, stem) for stem in ("small", "imagenet"))
    assert small == PLACE.workload("resnet18", 32, 10)
    assert small.forward.per_image_s > 5 * other.forward.per_image_s  # type: ignore[union-attr]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_input_bounds_all_micro_steps_of_a_step(accumulation: int) -> None:
    slow = replace(PLACE, input_images_per_s=100.0)
    found = clock(slow, accumulation=accumulation)
    assert found.step_s == pytest.approx(accumulation * 0.1)
    # One rank alone would wait for its input as long.
    assert found.efficiency == pytest.approx(1.0)
    assert found.images_per_s == pytest.approx(4 * 100.0)


def test_power_is_the_board_s_unless_it_is_given() -> None:
    assert clock().watts_per_gpu == 700
    assert clock(replace(PLACE, watts_per_gpu=900.0)).watts_per_gpu == 900
    assert RehearseSettings(nodes=2).watts == 0


def test_what_the_times_leave_out_is_said() -> None:
    work = PLACE.workload("resnet18", 32, 10)
    assert work is not None
    assert PLACE.left_out(work, "lars", half=True) == ()
    assert clock().describe().endswith("%")
    found = PLACE.left_out(work, "muon", half=False)
    assert "without fp32" in clock(left_out=found).describe()
    assert "the update of muon" in clock(left_out=found).describe()
    measured = replace(PLACE, profile="p.toml")
    full = work.with_tensors({g.name: (g.elements, False) for g in work.gradients})
    assert measured.left_out(full, "muon", half=False) == ()
    assert measured.left_out(full, "muon", half=True) == ("half precision (the times are of fp32)",)
    assert measured.left_out(replace(full, image_size=0), "muon", half=False) == (
        "a known image size (the profile does not state it)",
    )


def test_frozen_layers_are_not_sent_and_a_foreign_model_is_refused() -> None:
    work = PLACE.workload("resnet18", 32, 10)
    assert work is not None
    trained = {g.name: (g.elements, True) for g in work.gradients if g.name != "conv1.weight"}
    assert PLACE.workload("resnet18", 32, 10, tensors=trained) == work
    assert {g.name for g in work.with_tensors(trained).gradients} == set(trained)
    assert "frozen layers" in PLACE.left_out(work, "sgd", half=True, trained=trained)[0]
    with pytest.raises(ConfigError, match="lacks tensors") as caught:
        PLACE.workload("resnet18", 32, 10, tensors={**trained, "mine.weight": (3, True)})
    assert caught.value.field == "rehearse.gpu"


def test_a_cpu_is_timed_in_fp32() -> None:
    """What `auto` trains in on a CPU: four bytes on the wire and in memory."""
    place = replace(PLACE, gpu="CPU")
    work = place.workload("resnet18", 32, 10)
    assert work is not None
    assert not work.in_half
    assert place.left_out(work, "sgd", half=False) == ()
    assert place.left_out(work, "sgd", half=True) == ("half precision (the times are of fp32)",)


def test_a_batch_that_does_not_fit_is_refused() -> None:
    def check(model: str, batch: int, *, half: bool = True) -> None:
        PLACE.check_batch(model, 224, 1000, stem="imagenet", batch=batch, half=half)

    check("resnet50", 1_000)
    check("resnet_tiny", 1_000_000)  # its layers are not known
    for batch, half in ((1_000_000, True), (1_000, False)):
        with pytest.raises(ConfigError, match="at most") as caught:
            check("resnet50", batch, half=half)
        assert caught.value.field == "run.batch_size"


def test_a_cluster_file_without_a_step_names_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    PlanFile(workload=made_workload()).write(path)
    with_step = RehearseSettings(nodes=2, cluster=str(path), input_images_per_s=10.0)
    assert with_step.workload("m", 32, 10) == replace(made_workload(), input=Affine(0.0, 0.1))
    PlanFile().write(path)
    with pytest.raises(ConfigError, match=r"no \[workload\]"):
        with_step.workload("m", 32, 10)
