from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.core.errors import ConfigError
from paceline.models import MODEL_NAMES, ModelSettings, create_model
from paceline.plan.optimizer import best_plan
from paceline.plan.plan_file import (
    ClusterFacts,
    LinkFacts,
    ModelFacts,
    PlanFile,
    ProbedCluster,
)
from paceline.planner.accelerators import accelerator
from paceline.planner.analytic_workload import analytic_workload
from paceline.planner.layers import TRACED, is_network, network
from paceline.planner.scaling import predict_scaling
from paceline.rehearsal.cluster_clock import RehearsedCluster
from paceline.rehearsal.settings import RehearsalSettings
from refusals import refused

KEYS = {
    "images_per_s", "images_per_s_per_gpu", "step_s", "compute_s", "exposed_comm_s",
    "input_stall_s", "efficiency", "uncertainty", "buffers",
}  # fmt: skip


def ask(*flags: str) -> str:
    found = CliRunner().invoke(app, ["plan", *flags], catch_exceptions=False, standalone_mode=False)
    return found.output


def test_json_table_page_and_plan(tmp_path: Path) -> None:
    flags = ("--gpu", "V100", "--nodes", "4", "-b", "64")
    page, plan = tmp_path / "p.html", tmp_path / "p.toml"
    found = json.loads(ask(*flags, "--json", "--plan-out", str(plan)))
    assert set(found) >= KEYS
    assert found["ranks"] == 32
    made = PlanFile.read(plan)
    assert len(made.plan.buckets) == len(found["buffers"])
    assert sum(b["tensors"] for b in found["buffers"]) == 161
    ask(*flags, "--html", str(page))
    assert "<svg" in page.read_text()
    scored = json.loads(ask(*flags, "--json", "--with-plan", str(plan)))
    assert scored["step_s"] == pytest.approx(found["step_s"])
    with refused("--with-plan", "is for a cluster with ranks = 32"):
        ask("--gpu", "V100", "--nodes", "8", "--with-plan", str(plan))


def test_without_a_batch_one_is_recommended() -> None:
    flags = ("--gpu", "H100", "--nodes", "4", "--node-gbps", "3200", "--links", "8")
    found = json.loads(ask(*flags, "--json"))
    assert found["recommended_batch"]
    assert found["batch_size"] <= found["largest_batch"]
    assert found["global_batch_size"] <= 65_536
    assert found["memory"]["total"] < 80e9
    assert {(o["nodes"], o["batch"]) for o in found["options"]} >= {(4, found["batch_size"])}
    given = json.loads(ask(*flags, "--json", "-b", "64"))
    assert not given["recommended_batch"]
    assert given["batch_size"] == 64
    assert "recommended" in ask(*flags)


def test_recomputed_norms_need_less_memory() -> None:
    flags = ("--gpu", "H100", "-b", "256", "--json")
    stored, again = (json.loads(ask(*flags, *more)) for more in ((), ("--recompute-norms",)))
    assert again["memory"]["total"] < 0.8 * stored["memory"]["total"]


@pytest.mark.parametrize("wires", [("e4m3",), ("auto", "int8")])
def test_8_bit_wires_have_a_plan(tmp_path: Path, wires: tuple[str, ...]) -> None:
    path = tmp_path / "plan.toml"
    flags = ("--gpu", "H100", "--nodes", "4", "-b", "64", "--gpus-per-node", "1", "--node-gbps", "10",
             "--json")  # fmt: skip
    allowed = [part for wire in wires for part in ("--wire", wire)]
    found = json.loads(ask(*flags, *allowed, "--plan-out", str(path)))
    assert {"int8", "float8_e4m3"} & {bucket["wire"] for bucket in found["buffers"]}
    assert "all_to_all" in {bucket["algorithm"] for bucket in found["buffers"]}
    scored = json.loads(ask(*flags, "--with-plan", str(path)))
    assert scored["step_s"] == pytest.approx(found["step_s"])
    assert scored["start_up"] == found["start_up"]


def profiled(path: Path, model: str = "resnet50", pixels: int = 224, device: str = "cuda") -> str:
    """A file as `paceline profile -b 4 -b 8` writes it."""
    net = network("resnet18" if model == "resnet_tiny" else model, pixels)
    work = analytic_workload(net, accelerator("CPU" if device == "cpu" else "H100"))
    work = replace(work, model=model, source="profiled", batches=(4, 8), device=device, spread=0.02)
    PlanFile(workload=work.to_section()).write(path)
    return str(path)


def test_beyond_the_profiled_batches_the_answer_is_less_certain(tmp_path: Path) -> None:
    flags = ("--profile", profiled(tmp_path / "p.toml"), "--gpus-per-node", "1")
    near, far = (json.loads(ask(*flags, "--json", "-b", batch)) for batch in ("8", "384"))
    assert (near["extrapolated"], far["extrapolated"]) == (False, True)
    assert far["uncertainty"] > 2 * near["uncertainty"]
    # Its layers are known by name, without a GPU to fit into.
    assert far["memory"]["activations"] > 40 * near["memory"]["activations"]


def test_without_a_limit_of_memory_the_profile_bounds_the_batch(tmp_path: Path) -> None:
    flags = ("--profile", profiled(tmp_path / "p.toml"))
    alone = (*flags, "--gpus-per-node", "1")
    found = json.loads(ask(*alone, "--json"))
    assert found["recommended_batch"]
    assert found["batch_size"] <= found["largest_batch_of_the_profile"] == 16
    assert max(option["batch"] for option in found["options"]) <= 16
    for more in ((*alone, "-b", "384"), (*flags, "--gpu", "H100")):
        free = json.loads(ask(*more, "--json"))
        assert free["largest_batch_of_the_profile"] is None
        assert free["batch_size"] > 16
        assert any(option["batch"] > 16 for option in free["options"])


def test_a_profile_of_a_cpu_starts_without_nccl(tmp_path: Path) -> None:
    path = profiled(tmp_path / "p.toml", "resnet_tiny", 32, "cpu")
    found = json.loads(
        ask("--profile", path, "--gpus-per-node", "1", "--nodes", "2", "-b", "8", "--json")
    )
    assert found["start_up"]["backend_s"] == 0
    # Counted from a trace: the planner has no layers of this model.
    assert found["memory"]["activations"] > 0
    assert found["memory"]["libraries"] == found["memory"]["graph"] == 0


def test_built_in_models_without_layers_are_counted() -> None:
    flags = ("--gpu", "H100", "--model", "resnet_tiny", "--image-size", "32", "-b", "64", "--json")
    found = json.loads(ask(*flags))
    assert "counted from a trace" in found["source"]
    assert found["memory"]["total"] > 0
    with pytest.raises(ConfigError, match="paceline plan --model resnet_tiny"):
        predict_scaling("resnet_tiny")
    assert {name for name in MODEL_NAMES if not is_network(name)} == set(TRACED)


@pytest.mark.parametrize("model", ["resnet_tiny", "resnet18"])
def test_a_plan_for_few_classes_is_the_trained_models(tmp_path: Path, model: str) -> None:
    """What `paceline train --plan` compares."""
    path = tmp_path / "plan.toml"
    size = "--image-size", "32", "--classes", "4", "--channels", "1"
    ask("--gpu", "CPU", "--gpus-per-node", "2", "--model", model, *size, "-b", "8",
        "--plan-out", str(path))  # fmt: skip
    made = create_model(ModelSettings(model), num_classes=4, in_channels=1, image_size=32)
    facts = ModelFacts.of((name, p.numel()) for name, p in made.named_parameters())
    PlanFile.read(path).check(facts, ClusterFacts(2, 1), str(path))


def test_the_library_has_the_models_ends_and_the_largest_batch() -> None:
    flags = ("--gpu", "A100", "--nodes", "8", "--model", "resnet18", "--json")
    ends = ("--classes", "21000", "--channels", "4", "--max-global-batch", "4096")
    found = json.loads(ask(*flags, *ends))
    told = predict_scaling(
        "resnet18", accelerator="a100", nodes=8, batch_size=None, classes=21_000, channels=4,
        max_global_batch=4096,
    )  # fmt: skip
    assert told.batch_size == found["batch_size"] <= 64
    assert told.step_s == pytest.approx(found["step_s"])
    assert found["step_s"] > json.loads(ask(*flags, "-b", str(told.batch_size)))["step_s"]
    with pytest.raises(ConfigError, match="limit with max_global_batch="):
        predict_scaling(nodes=10_000, batch_size=None)
    for argument in ("classes", "channels", "max_global_batch"):
        with pytest.raises(ConfigError) as caught:
            predict_scaling(batch_size=None, **{argument: 0})
        assert caught.value.field.startswith(argument)


@pytest.mark.parametrize(("backend", "is_nccl"), [("nccl", True), ("gloo", False)])
def test_a_cluster_starts_over_the_backend_it_was_probed_with(
    tmp_path: Path, backend: str, is_nccl: bool
) -> None:
    path = tmp_path / "c.toml"
    link = LinkFacts(1e-5, 1e-9)
    probed = ProbedCluster((2, 2), backend, "cuda", link, link)
    PlanFile(cluster=probed.facts, probed=probed).write(path)
    found = json.loads(ask("--cluster", str(path), "--gpu", "H100", "-b", "64", "--json"))
    assert (found["start_up"]["backend_s"] > 0) == is_nccl
    settings = RehearsalSettings(nodes=2, gpus_per_node=2, gpu="H100", cluster=str(path))
    there = RehearsedCluster(settings)
    work = analytic_workload(network("resnet50"), accelerator("H100"))
    rehearsed = there.start_up(best_plan(work, there.place(), 64))
    assert (rehearsed.backend_s > 0) == is_nccl


def test_a_cluster_file_of_one_node_is_for_one_node(tmp_path: Path) -> None:
    """It has no links between nodes, and those inside are no network."""
    path = tmp_path / "c.toml"
    probed = ProbedCluster((2,), "nccl", "cuda", LinkFacts(1e-5, 1e-9))
    PlanFile(cluster=probed.facts, probed=probed).write(path)
    flags = ("--cluster", str(path), "--gpu", "H100")
    found = json.loads(ask(*flags, "--json", "--target-minutes", "1"))
    assert {option["nodes"] for option in found["options"]} == {1}
    assert [point["ranks"] for point in found["scaling"]] == [2]
    assert found["largest_ranks_at_90_percent"] in (None, 2)
    with refused("--nodes"):
        ask(*flags, "--nodes", "2")
    with refused("nodes = 2"):
        predict_scaling(accelerator="h100", nodes=2, cluster=path)
    assert [row.nodes for row in predict_scaling(accelerator="h100", cluster=path).rows] == [1]


EXTREMES = ("0", "-1", "nan", "inf", "1e308", "1e-300")


@pytest.mark.parametrize(
    "flag",
    ["--node-gbps", "--latency-us", "--oversubscription", "--epochs", "--noise-scale", "--target-minutes",
     "--price-per-gpu-hour", "--budget", "--startup-s", "--input-images-per-s"],
)  # fmt: skip
def test_an_absurd_number_is_a_line_or_an_answer(flag: str) -> None:
    price = () if flag == "--price-per-gpu-hour" else ("--price-per-gpu-hour", "1")
    for value in EXTREMES:
        field, told = flag, ""
        try:
            told = ask("--gpu", "H100", "-b", "8", "--json", *price, flag, value)
        except ConfigError as error:
            field = error.field
        assert field == flag
        assert not {"Infinity", "NaN"} & set(re.findall(r"\w+", told))


# Below `--gpu H100`, unless another is given.
MISTAKES = {
    "--gpu": ("--gpu h101", "--gpu nowhere.toml"),
    "--profile": ("--profile nowhere.toml",),
    "--model": ("--model resnet51",),
    "model.name": ("--model plan.no_such:net",),
    "--classes": ("--classes 0",),
    "--channels": ("--model plan.any:net --channels 0",),
    "--image-size": ("--image-size 0", "--image-size 1000000", "--model alexnet --image-size 32"),
    "--nodes": ("--nodes 0", "--nodes 100000", "--nodes 1000000", f"--nodes 1{400 * '0'}"),
    "--gpus-per-node": ("--gpus-per-node 1000000 --nodes 2",),
    "--node-gbps": ("--node-gbps -1", "--node-gbps inf", "--cluster c.toml --node-gbps 9"),
    "--latency-us": ("--latency-us 1e12",),
    "--batch-size": ("-b 0", "-b 1000000", "--nodes 100000 -b 64"),
    "--noise-scale": ("--noise-scale 1e-4",),
    "--with-plan": ("--with-plan nowhere.toml", "--with-plan p.toml --wire float16"),
    "--budget": ("--budget 10",),
    "--software": ("--software v9",),
    "--input-images-per-s": ("--input-images-per-s nan",),
    "--recompute-norms": ("--model alexnet --recompute-norms",),
    "--epochs": ("--epochs 0",),
    "--algorithm": ("--algorithm rign",),
    "--wire": ("--wire fp8",),
    "--cluster": ("--cluster nowhere.toml",),
}


@pytest.mark.parametrize(
    ("field", "flags"), [(field, flags) for field, given in MISTAKES.items() for flags in given]
)
def test_a_mistake_is_named_by_its_flag(field: str, flags: str) -> None:
    with refused(field):
        ask("--gpu", "H100", *flags.split())
