"""The clock of a rehearsal: the step of the trained model, and refused input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.plan_file import PlanFile
from paceline.planner.accelerators import accelerator
from paceline.planner.layers import Network, network
from paceline.planner.memory import largest_batch
from paceline.planner.workload import Affine, Workload
from paceline.rehearsal.cluster_clock import ClusterClock, RehearsedCluster, cluster_clock
from paceline.rehearsal.settings import RehearsalSettings
from plan.made import made_workload
from refusals import refused

PLACE = RehearsalSettings(nodes=2, gpus_per_node=2, gpu="H100")
HERE = RehearsedCluster(PLACE)


def resnet(settings: RehearsalSettings = PLACE, stem: str = "auto", **values: Any) -> Workload:
    """The step of a ResNet-18 on small images."""
    there = RehearsedCluster(settings)
    work = there.workload("resnet18", 32, there.network("resnet18", 32, 10, stem), **values)
    assert work is not None
    return work


def clock(settings: RehearsalSettings = PLACE, **changes: Any) -> ClusterClock:
    given: dict[str, Any] = {"batch": 10, "accumulation": 1, "validation": 40, "eval_batch": 20}
    work = resnet(settings)
    plan = FusionPlan.single(tuple(gradient.name for gradient in work.gradients))
    return cluster_clock(settings, plan, work, **given | changes)


def test_the_step_is_that_of_the_stem() -> None:
    small, other = (resnet(stem=stem) for stem in ("small", "imagenet"))
    assert small == resnet()
    assert small.forward.per_image_s > 5 * other.forward.per_image_s


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_input_bounds_all_micro_steps_of_a_step(accumulation: int) -> None:
    slow = replace(PLACE, input_images_per_s=100.0)
    found = clock(slow, accumulation=accumulation)
    assert found.step_s == pytest.approx(accumulation * 0.1)
    # One rank alone would wait for its input as long.
    assert found.efficiency == pytest.approx(1.0)
    assert found.images_per_s == pytest.approx(4 * 100.0)


def test_power_is_the_board_s() -> None:
    assert clock().watts_per_gpu == 700
    assert RehearsedCluster(RehearsalSettings(nodes=2)).watts == 0


def test_assumed_links_are_shown() -> None:
    assert "; from layers of the network on H100; assumed: 8 × 400 Gb/s" in clock().describe()
    assert "assumed: one link a node" in clock(replace(PLACE, node_gbps=100.0)).describe()


def test_frozen_layers_are_not_sent_and_a_foreign_model_is_refused() -> None:
    work = resnet()
    trained = {g.name: (g.elements, True) for g in work.gradients if g.name != "conv1.weight"}
    assert resnet(tensors=trained) == work
    assert {g.name for g in work.with_tensors(trained).gradients} == set(trained)
    with refused("run.rehearsal.gpu", "lacks tensors"):
        resnet(tensors={**trained, "mine.weight": (3, True)})


def test_a_cpu_is_timed_in_fp32() -> None:
    """What `auto` trains in on a CPU: four bytes on the wire and in memory."""
    assert not resnet(replace(PLACE, gpu="CPU")).in_half


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf"), 1e-310])
def test_an_input_without_a_speed_is_refused(rate: float) -> None:
    with refused("run.rehearsal.input_images_per_s"):
        replace(PLACE, input_images_per_s=rate)


def test_a_batch_that_does_not_fit_is_refused() -> None:
    net = HERE.network("resnet50", 224, 1000)
    HERE.check_batch(net, batch=1_000, half=True)
    HERE.check_batch(None, batch=1_000_000, half=True)  # its layers are not known
    small = HERE.network("resnet18", 224, 1000)
    assert small is not None
    most = largest_batch(small, accelerator(PLACE.gpu))
    HERE.check_batch(small, batch=most, half=True)
    with pytest.raises(ConfigError, match="at most"):  # as with run.accel.fused_norm = "off"
        HERE.check_batch(small, batch=most, half=True, fused=False)
    for batch, half in ((1_000_000, True), (1_000, False)):
        with refused("run.batch_size", "at most"):
            HERE.check_batch(net, batch=batch, half=half)


def test_a_cluster_file_without_a_step_names_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    PlanFile(workload=made_workload().to_section()).write(path)
    with_step = RehearsedCluster(
        RehearsalSettings(nodes=2, cluster=str(path), input_images_per_s=10.0)
    )
    assert with_step.workload("m", 32) == replace(made_workload(), input=Affine(0.0, 0.1))
    PlanFile().write(path)
    with pytest.raises(ConfigError, match=r"section \[workload\]"):
        with_step.workload("m", 32)


def test_layers_are_counted_only_where_the_planner_needs_them() -> None:
    counts: list[Network] = []

    def count() -> Network:
        counts.append(Network("mine", 32, network("resnet18", 32).layers))
        return counts[-1]

    assert HERE.network("mine", 32, 10, count=count) is counts[0]
    assert HERE.network("resnet18", 28, 10, count=count) is counts[1]  # too small for the built-in
    assert HERE.network("resnet18", 32, 10, count=count) == network("resnet18", 32, 10)
    grey = HERE.network("resnet18", 32, 10, channels=1)
    assert grey == network("resnet18", 32, 10, channels=1) != network("resnet18", 32, 10)
    assert (
        RehearsedCluster(replace(PLACE, profile="p.toml")).network("mine", 32, 10, count=count)
        is None
    )
    assert RehearsedCluster(RehearsalSettings(nodes=2)).network("mine", 32, 10, count=count) is None
    assert len(counts) == 2

    def refuse() -> Network:
        raise ConfigError("--model", "mine", "does not run on the meta device", "profile it")

    with refused("run.rehearsal.gpu", "mine does not run on the meta device") as caught:
        HERE.network("mine", 32, 10, count=refuse)
    assert "--profile FILE" in caught.value.remedy
