from __future__ import annotations

import pytest

from paceline.core.errors import ConfigError
from paceline.plan.accelerator import accelerator, catalogue
from paceline.plan.analytic_workload import analytic_workload
from paceline.plan.choose_plan import best_plan, threshold_plan
from paceline.plan.gpu_cluster import gpu_cluster
from paceline.plan.network import network
from paceline.plan.prediction import predict
from paceline.plan.straggler import slowest_of


@pytest.mark.parametrize("name", [n for n, gpu in catalogue().items() if gpu.measured])
def test_the_measured_training_comes_back(name: str) -> None:
    """One node, its own batch: the compute time is what was measured."""
    gpu = accelerator(name)
    seen = gpu.measured
    assert seen is not None
    work = analytic_workload(network("resnet50"), gpu)
    step = work.compute_s(seen.batch) * slowest_of(seen.ranks)
    assert seen.batch / step == pytest.approx(seen.images_per_s, rel=1e-3)


# GPU, nodes, GPUs a node, batch a GPU, images/s a GPU, links of a node, Gb/s of a link.
SEEN = [
    ("H100", 8, 8, 50, 4603, 8, 400),
    ("H100", 2, 8, 200, 6295, 8, 400),
    ("A100", 8, 8, 51, 2618, 8, 200),
    ("A100", 8, 8, 204, 3102, 8, 200),
    ("A100-PCIE-40GB", 8, 4, 408, 2851, 1, 100),
    ("V100", 32, 16, 65, 1239, 8, 100),
]


def test_measured_systems_of_many_nodes() -> None:
    """No constant was fitted to these rows; they were known when the model was made."""
    away = []
    for name, nodes, gpus, batch, seen, links, gbps in SEEN:
        gpu = accelerator(name)
        work = analytic_workload(network("resnet50"), gpu)
        cluster = gpu_cluster(gpu, nodes, gpus, links * gbps, links=links)
        plan = best_plan(work, cluster, batch, ("native",))
        away.append(abs(predict(work, cluster, plan, batch).images_per_s_per_gpu / seen - 1))
    assert sum(away) / len(away) <= 0.10
    assert max(away) <= 0.20


def test_every_figure_has_a_source() -> None:
    for gpu in catalogue().values():
        assert gpu.source
        assert gpu.measured is None or gpu.measured.source
        assert not gpu.like or accelerator(gpu.like).measured


def test_half_the_batch_is_less_than_half_as_slow() -> None:
    work = analytic_workload(network("resnet50"), accelerator("H200"))
    assert work.compute_s(64) > work.compute_s(128) / 2


def test_names_are_found_in_any_case_and_guessed() -> None:
    assert accelerator("h100").name == "H100"
    with pytest.raises(ConfigError, match="did you mean 'H100'"):
        accelerator("h10")


def test_fewer_bytes_and_faster_links_help() -> None:
    gpu = accelerator("V100")
    work = analytic_workload(network("alexnet"), gpu)
    slow, fast = (gpu_cluster(gpu, 16, 8, gbps) for gbps in (10, 100))
    step = {
        (place.inter.beta_s, wire): predict(
            work, place, threshold_plan(work, place, 1 << 24, wire=wire), 64
        ).step_s
        for place in (slow, fast)
        for wire in ("float32", "float16")
    }
    assert step[slow.inter.beta_s, "float16"] < step[slow.inter.beta_s, "float32"]
    assert step[fast.inter.beta_s, "float32"] < step[slow.inter.beta_s, "float32"]
