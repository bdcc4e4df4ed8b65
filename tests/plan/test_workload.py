"""Workloads, networks and clusters."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.plan.cluster import Cluster, Link, slowest_of
from paceline.plan.optimizer import best_plan
from paceline.plan.plan_file import PlanFile
from paceline.planner.accelerators import (
    NodeNetwork,
    accelerator,
    assumed,
    catalogue,
    gpu_cluster,
)
from paceline.planner.analytic_workload import analytic_workload
from paceline.planner.layers import network
from paceline.planner.plan_parts import profile_of
from paceline.planner.prediction import predict
from paceline.planner.workload import Affine, StepAnatomy, Workload, fit_workload
from plan.made import made_workload
from refusals import refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gradients": ()}, "empty"),
        ({"update_s": -1.0}, "update_s"),
        ({"forward": Affine(-1.0, 0.0)}, "forward.fixed_s"),
        ({"backward": Affine(0.0, float("nan"))}, "backward.per_image_s"),
        ({"forward": Affine(0, 0), "backward": Affine(0, 0)}, "no time"),
    ],
)
def test_figures_that_cannot_be(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(made_workload(), **changes)  # type: ignore[arg-type]


def test_small_batches_take_longer_where_the_chip_is_not_full() -> None:
    time = Affine(1e-3, 1e-4, fill_s=2e-3, fill_batch=20.0)
    assert time.at(0) == pytest.approx(3e-3)
    assert time.at(20) == pytest.approx(1e-3 + 2e-3 + 2e-3 / math.e)
    assert time.at(500) == pytest.approx(1e-3 + 5e-2, rel=1e-9)
    assert time.scaled(3).at(20) == pytest.approx(3 * time.at(20))
    with pytest.raises(ConfigError, match="fill_batch"):
        replace(made_workload(), forward=replace(time, fill_batch=0.0))


def test_the_small_batch_part_goes_through_the_file() -> None:
    work = replace(made_workload(), forward=Affine(1e-3, 1e-4, 2e-3, 20.0))
    table = work.to_table()
    assert "fill_s" not in table["workload"]["backward"]
    assert Workload.from_table(table) == work


def test_more_multiprocessors_need_larger_batches() -> None:
    """With equal peaks on twice as many multiprocessors, only small batches are slower."""
    gpu = accelerator("A100")
    wide = replace(gpu, processors=2 * gpu.processors)
    net = network("resnet50")
    one, other = analytic_workload(net, gpu), analytic_workload(net, wide)
    assert other.compute_s(8) > 1.1 * one.compute_s(8)
    assert other.compute_s(512) == pytest.approx(one.compute_s(512), rel=1e-3)


def test_power_and_software_change_the_products_alone() -> None:
    gpu = accelerator("A100")
    net = network("resnet50")
    new = analytic_workload(net, gpu)
    weak = analytic_workload(net, replace(gpu, watts=300))
    assert new.forward.per_image_s < weak.forward.per_image_s < 4 / 3 * new.forward.per_image_s
    assert weak.forward.fixed_s == new.forward.fixed_s
    old = analytic_workload(net, gpu, "v0.7")
    assert old.forward.per_image_s > new.forward.per_image_s
    assert analytic_workload(net, gpu, "v2.0").forward == new.forward
    with pytest.raises(ConfigError, match="--software"):
        analytic_workload(net, gpu, "v9")


def test_shares_must_rise() -> None:
    with pytest.raises(ConfigError, match="not below the gradient before it"):
        made_workload((1, 1), ready=(0.9, 0.3))


ANATOMY = StepAnatomy(0.010, 0.020, 0.001, (("b", 5, True, 0.008), ("a", 7, False, 0.021)))


def test_a_line_through_the_steps() -> None:
    steps = [(batch, 0.004 + 0.001 + 1e-4 * batch) for batch in (64, 256, 512)]
    work = fit_workload("made", steps, ANATOMY, "here")
    assert work.compute_s(128) == pytest.approx(0.005 + 0.0128)
    assert work.update_s == 0.001
    assert work.forward.at(100) * 2 == pytest.approx(work.backward.at(100))
    assert work.forward.fixed_s + work.backward.fixed_s == pytest.approx(0.004)
    assert [(g.name, g.half) for g in work.gradients] == [("b", True), ("a", False)]
    # The last may be seen a little after the pass has ended.
    assert [g.ready for g in work.gradients] == pytest.approx([0.4, 1.0])
    assert work.spread == pytest.approx(0.02)


def test_an_update_that_took_long_by_itself_leaves_the_line_as_it_is() -> None:
    """It cannot take more than what does not depend on the batch."""
    steps = [(batch, 0.0006 + 1e-4 * batch) for batch in (8, 32, 512)]
    work = fit_workload("made", steps, ANATOMY, "here")
    assert work.update_s == pytest.approx(0.0006)
    for batch, seconds in steps:
        assert work.compute_s(batch) == pytest.approx(seconds)


def test_one_batch_goes_through_the_origin() -> None:
    work = fit_workload("made", [(10, 0.101)], ANATOMY, "here")
    assert work.compute_s(20) == pytest.approx(0.001 + 0.2)
    assert work.spread == 0.1


def test_larger_batches_must_be_slower() -> None:
    with pytest.raises(ConfigError, match="quiet machine"):
        fit_workload("made", [(10, 0.2), (20, 0.1)], ANATOMY, "here")


def test_outside_of_the_profiled_batches_less_is_known(tmp_path: Path) -> None:
    """Two steps that are each off by 2 % leave the slope between them open, and steps are on no line."""
    work = fit_workload("made", [(4, 0.10), (8, 0.12)], ANATOMY, "here", 32, "cpu")
    assert (work.batches, work.device) == ((4, 8), "cpu")
    for batch, spread in ((4, 0.02), (6, 0.04), (8, 0.02)):
        assert work.spread_at(batch) == spread
        assert not work.is_extrapolated(batch)
    assert replace(work, spread=0.1).spread_at(6) == 0.1
    spreads = [work.spread_at(batch) for batch in (8, 6, 16, 64, 384)]
    assert spreads == sorted(spreads)
    # 0.005 s an image, of which 2 % of 0.10 and of 0.12 s over 4 images are 16 %; and 5.6 doublings.
    slope = 0.02 * math.hypot(0.10, 0.12) / 4 / 0.005
    assert spreads[-1] == pytest.approx(math.hypot(slope, 0.04, 5.6 * 0.04), rel=0.1)
    assert 0.04 < work.spread_at(2) < work.spread_at(1)
    PlanFile(workload=work.to_section()).write(tmp_path / "p.toml")
    assert profile_of(PlanFile.read(tmp_path / "p.toml")) == work
    # A file of an earlier version says nothing about it.
    old = replace(work, batches=())
    assert old.spread_at(384) == 0.02


def test_one_batch_alone_is_known_within_a_factor_for_every_doubling() -> None:
    one = fit_workload("made", [(128, 0.12)], ANATOMY, "here")
    assert one.spread_at(128) == 0.1
    for batches in ((128, 256, 512, 4096), (128, 64, 32, 1)):
        spreads = [one.spread_at(batch) for batch in batches]
        assert spreads == sorted(spreads)
    assert one.spread_at(256) == pytest.approx(math.hypot(0.1, 0.22))
    assert one.spread_at(1) == pytest.approx(1.17**7 - 1, rel=0.01)


PLANNER_DATA = Path(__file__).parents[2] / "records" / "planner" / "data.jsonl"


PROFILES = ((8, 128), (8, 32), (32, 128), (128,), (32,), (8, 32, 512))


def test_stated_errors_cover_measured_steps() -> None:
    """Counts all profiles together; the record lists them one by one."""
    series: dict[tuple[str, str], dict[int, float]] = {}
    for line in PLANNER_DATA.read_text().splitlines():
        entry = json.loads(line)
        if entry.get("file") != "rows.jsonl":
            continue
        row = entry["data"]
        if row["row"] == "step":
            steps = series.setdefault((row["model"], row["format"]), {})
            steps[row["batch"]] = row["step_ms"] / 1e3
    off = []
    for steps in series.values():
        for timed in (timed for timed in PROFILES if set(timed) <= steps.keys()):
            points = [(batch, steps[batch]) for batch in timed]
            work = fit_workload("made", points, ANATOMY, "there")
            for batch in steps.keys() - set(timed):
                ratio = work.compute_s(batch) / steps[batch]
                off.append((max(ratio, 1 / ratio) - 1) / work.spread_at(batch))
    assert len(off) > 100
    assert sum(one <= 1 for one in off) > 0.6 * len(off)
    assert sum(one <= 2 for one in off) > 0.9 * len(off)


@pytest.mark.parametrize("name", [n for n, gpu in catalogue().items() if gpu.measured])
def test_the_measured_training_comes_back(name: str) -> None:
    """One node, its own batch: the compute time is what was measured."""
    gpu = accelerator(name)
    seen = gpu.measured
    work = analytic_workload(network("resnet50"), gpu)
    step = work.compute_s(seen.batch) * slowest_of(seen.ranks)
    assert seen.batch / step == pytest.approx(seen.images_per_s, rel=1e-3)


# GPU, nodes, GPUs a node, batch a GPU, images/s a GPU, links of a node, Gb/s of a link.
SEEN = [
    ("H100", 8, 8, 50, 4603, 8, 400),
    ("H100", 2, 8, 200, 6295, 8, 400),
    ("A100", 8, 8, 51, 2618, 8, 200),
    ("A100", 8, 8, 204, 3102, 8, 200),
    ("A100-PCIE-80GB", 8, 4, 408, 2851, 1, 100),
    ("V100", 32, 16, 65, 1239, 8, 100),
]


def test_measured_systems_of_many_nodes() -> None:
    """All but the last are among the systems that the constants are fitted to."""
    away = []
    for name, nodes, gpus, batch, seen, links, gbps in SEEN:
        gpu = accelerator(name)
        work = analytic_workload(network("resnet50"), gpu)
        cluster = gpu_cluster(gpu, nodes, gpus, links * gbps, links=links)
        plan = best_plan(work, cluster, batch, ("native",))
        away.append(abs(predict(work, cluster, plan, batch).images_per_s_per_gpu / seen - 1))
    assert sum(away) / len(away) <= 0.05
    assert max(away) <= 0.11


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "resnet50",
        "resnet_fast",
        "alexnet",
        "alexnet_bn",
    ],
)
def test_the_tensors_are_the_models_own(name: str) -> None:
    """Names, sizes and which stay fp32, as in training; the order is that of the forward pass."""
    import torch

    from paceline.accel.networks import network_of
    from paceline.accel.stem import pads_images
    from paceline.models.registry import create_model
    from paceline.models.settings import ModelSettings
    from paceline.precision.policy import choose_policy
    from paceline.precision.settings import PrecisionSettings

    model = create_model(ModelSettings(name=name), num_classes=1000)
    choose_policy(PrecisionSettings(amp_dtype="bf16"), torch.device("cpu")).convert(model)
    wanted = {n: (p.numel(), p.dtype != torch.float32) for n, p in model.named_parameters()}
    found = network(name)
    assert {t.name: (t.elements, t.half) for t in found.tensors} == wanted
    known = network_of(model)
    assert found.has_fused_kernels == (known is not None)
    assert found.pads_images == (
        known is not None and known.first is not None and pads_images(known.first)
    )
    assert not network(name, channels=1).pads_images


@pytest.mark.parametrize(
    ("name", "size"),
    [("resnet50", 224), ("resnet18", 32), ("resnet_fast", 32), ("resnet_fast", 65),
     ("alexnet_bn", 224), ("alexnet_bn", 97)],
)  # fmt: skip
@pytest.mark.parametrize("channels", [1, 3])
def test_windows_are_those_of_training(name: str, size: int, channels: int) -> None:
    from torch import nn

    from paceline.accel.stem import window_form
    from paceline.models.registry import create_model
    from paceline.models.settings import ModelSettings

    model = create_model(ModelSettings(name), num_classes=10, in_channels=channels, image_size=size)
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    form = window_form(first)
    wanted = 0 if form is None else form.width * form.windows(size) ** 2
    layers = network(name, size, 10, channels=channels).layers
    assert layers[0].windows == wanted
    assert (wanted > 0) == (channels == 3 and name != "resnet50")
    assert not any(layer.windows for layer in layers[1:])


def test_the_products_of_known_networks() -> None:
    """Published: 4.1 and 0.71 billion multiply-adds."""
    assert network("resnet50").flops == pytest.approx(2 * 4.1e9, rel=0.02)
    assert network("alexnet").flops == pytest.approx(2 * 0.71e9, rel=0.02)
    by_hand = 27 * 64 * 1024 + 9 * 64 * (64 * 1024 + 64 * 512 + 256 * 256) + 9 * 256 * 256 * 224
    assert network("resnet_fast", 32, 10).flops == pytest.approx(2 * by_hand, rel=0.03)


@pytest.mark.parametrize(
    ("size", "stem"), [(32, "auto"), (64, "auto"), (65, "auto"), (32, "imagenet")]
)
def test_the_stem_is_that_of_training(size: int, stem: str) -> None:
    from paceline.models.registry import create_model
    from paceline.models.settings import ModelSettings

    model = create_model(ModelSettings("resnet18", stem=stem), num_classes=10, image_size=size)
    found = network("resnet18", size, 10, stem)
    assert {t.name: t.elements for t in found.tensors} == {
        name: p.numel() for name, p in model.named_parameters()
    }


def test_small_images_are_not_shrunk_by_the_stem() -> None:
    assert network("resnet18", 32, 10).flops == pytest.approx(1.114e9, rel=0.01)
    assert network("resnet18", 32, 10, "imagenet").flops == pytest.approx(0.074e9, rel=0.02)


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'resnet50'"):
        network("resnet5")
    with pytest.raises(ConfigError, match=r"known: .*resnet_tiny.*timm:NAME or module:factory"):
        network("vgg16")
    for size in (8, 1_000_000):
        with pytest.raises(ConfigError, match="image-size"):
            network("resnet50", size)


@pytest.mark.parametrize("flag", ["nodes", "gpus_per_node", "node_gbps", "latency_us", "links"])
def test_no_figure_may_be_nothing(flag: str) -> None:
    values = {"nodes": 2, "gpus_per_node": 2, "node_gbps": 100.0, "latency_us": 5.0, "links": 1}
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')}"):
        gpu_cluster(accelerator("V100"), **{**values, flag: 0})  # type: ignore[arg-type]


OWN = """
["Own GPU"]
tflops = 989
memory_gb_per_s = 3350
memory_gb = 80
node_gb_per_s = 450
processors = 132
clock_ghz = 1.83
watts = 700
compute_capability = 9.0
"""


def own(path: Path, text: str = OWN) -> str:
    path.write_text(text)
    return str(path)


def test_an_accelerator_of_ones_own(tmp_path: Path) -> None:
    """The figures of an H100 give its times; that the law was not fitted to them costs certainty."""
    found, known = accelerator(own(tmp_path / "own.toml")), accelerator("H100")
    assert found == replace(
        known, name="Own GPU", family="Own GPU", source=found.source, is_own=True,
        network=NodeNetwork(),
    )  # fmt: skip
    ours, theirs = (analytic_workload(network("resnet50"), chip) for chip in (found, known))
    assert ours.compute_s(64) == theirs.compute_s(64)
    assert ours.spread > theirs.spread
    assert "Own GPU, from its peaks as given" in ours.source


@pytest.mark.parametrize(
    ("given", "gbps", "links", "words"),
    [
        ({}, 3200, 8, {"node_gbps": "8 × 400 Gb/s a node as in DGX H100"}),
        ({"links": 4}, 3200, 4, {"node_gbps": "3200 Gb/s a node as in DGX H100"}),
        ({"node_gbps": 50.0}, 50, 1, {"links": "one link a node"}),
        ({"node_gbps": 800.0, "links": 2}, 800, 2, {}),
    ],
)
def test_links_that_are_not_given_are_those_of_the_reference_system(
    given: dict[str, Any], gbps: float, links: int, words: dict[str, str]
) -> None:
    chip = accelerator("H100")
    assert gpu_cluster(chip, 4, **given) == gpu_cluster(chip, 4, node_gbps=gbps, links=links)
    said = assumed(chip, {*given, "gpus_per_node", "latency_us", "oversubscription"})
    assert said == words


def test_an_own_accelerator_has_a_network(tmp_path: Path) -> None:
    text = OWN + "network = { gbps = 1600, links = 4 }\n"
    place = gpu_cluster(accelerator(own(tmp_path / "own.toml", text)), 2)
    assert place.links == 4
    assert place == gpu_cluster(accelerator("H100"), 2, node_gbps=1600, links=4)


def test_an_own_accelerator_is_scaled_to_a_measured_training(tmp_path: Path) -> None:
    text = OWN + "measured = { images_per_s = 5000, batch = 256, ranks = 8 }\n"
    chip = accelerator(own(tmp_path / "own.toml", text))
    place = gpu_cluster(chip, nodes=1)
    work = analytic_workload(network("resnet50"), chip)
    plan = best_plan(work, place, 256)
    assert predict(work, place, plan, 256).images_per_s_per_gpu == pytest.approx(5000, rel=0.02)
    like = accelerator(own(tmp_path / "like.toml", OWN + 'like = "H200"\nfamily = "H100"\n'))
    slower = analytic_workload(network("resnet50"), like).compute_s(256)
    assert slower > analytic_workload(network("resnet50"), accelerator("H100")).compute_s(256)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "tables"),
        (OWN + OWN.replace("Own", "Other"), "tables = 'Own GPU, Other GPU'"),
        ("x = 3", "x = 3: is not a table"),
        (OWN.replace("tflops = 989\n", ""), "Own GPU.tflops: is missing"),
        (OWN.replace("989", "nan"), "Own GPU.tflops"),
        (OWN.replace("3350", "0"), "Own GPU.memory_gb_per_s = 0"),
        (OWN + "tensor_cores = 5", "tensor_cores: unknown setting"),
        (OWN + 'like = "H100"', "like = 'H100': is not in the catalog; use one of P40, H200"),
        (OWN + 'family = "B"', "family = 'B'"),
        (OWN + "reference_watts = 0", "Own GPU.reference_watts = 0"),
        (OWN + "reference_watts = 300", "Own GPU.reference_watts = 300.*from 350 to 1400"),
        (OWN.replace("Own GPU", ""), "tables = '': the file must have one table"),
        (OWN + "measured = { images_per_s = 9 }", "measured.batch: is missing"),
        (OWN + "network = { gbps = 0 }", "Own GPU.network.gbps = 0"),
    ],
)
def test_a_mistake_in_an_own_accelerator_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with refused("--gpu", words) as caught:
        accelerator(own(tmp_path / "own.toml", text))
    assert "own.toml" in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("rate", [1e6, 1.0])
def test_a_measured_training_that_cannot_be(tmp_path: Path, rate: float) -> None:
    """Faster than the latency of the layers, or far below the peaks."""
    text = OWN + f"measured = {{ images_per_s = {rate}, batch = 64 }}"
    chip = accelerator(own(tmp_path / "own.toml", text))
    with pytest.raises(ConfigError, match=r"Own GPU.measured.*check the peaks"):
        analytic_workload(network("resnet50"), chip)


def test_what_bounds_a_ring() -> None:
    made = Cluster(2, 2, Link(3e-6, 5e-9), Link(1e-5, 1e-9), oversubscription=4)
    assert made.slowest == Link(1e-5, 5e-9)
    assert made.with_nodes(1).slowest == made.intra
    assert Cluster(2, 1, Link(1, 1), Link(1e-5, 1e-9), oversubscription=4).slowest.beta_s == 4e-9
    with pytest.raises(ConfigError, match="oversubscription"):
        Cluster(2, 2, Link(0, 0), Link(0, 0), oversubscription=0.5)


def test_every_figure_of_the_catalogue_has_a_source() -> None:
    for gpu in catalogue().values():
        assert gpu.source
        assert gpu.network.system
        assert gpu.measured is None or gpu.measured.source
        assert not gpu.like or accelerator(gpu.like).measured
