"""Rehearsals: one process trains to the bits of the ranks that it simulates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.core.events import EvalEvent, NoteEvent, StepEvent
from paceline.rehearsal.strategy import VirtualStatistics
from paceline.report import RunFiles, summary_rows, verdict
from paceline.train.batch_norm import pool
from ranks import run_ranks
from refusals import refused
from small_runs import run_on_ranks, run_small, tiny_plan
from train.runs import EVERY_STEP, last, stop_after, watched


def rehearsed(ranks: int, **settings: Any) -> dict[str, Any]:
    named = {"nodes": 1, "gpus_per_node": ranks, **settings}
    return {"run__strategy": "rehearsal", **{f"run__rehearsal__{k}": v for k, v in named.items()}}


# The last step is short: 112 samples in batches of 32. Three micro-steps a rank need fp32 sums.
CASES: dict[str, dict[str, Any]] = {
    "native": {"run__global_batch_size": 32, "run__batch_size": 4, "comm__algorithm": "native"},
    "hierarchical in fp16": {
        "run__global_batch_size": 16, "comm__algorithm": "hierarchical", "comm__wire": "float16",
        "comm__fusion_mib": 0.1,
    },
    "halving in bf16, averaged": {
        "run__global_batch_size": 16, "comm__algorithm": "halving_doubling", "comm__wire": "bfloat16",
        "run__average_epochs": 1.0, "comm__fusion_mib": 0.2,
    },
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "case"), [(2, "native"), (4, "native"),
    (4, "hierarchical in fp16"), (4, "halving in bf16, averaged")])  # fmt: skip
def test_a_rehearsal_ends_with_the_bits_of_its_ranks(tmp_path: Path, ranks: int, case: str) -> None:
    there = run_on_ranks(ranks, tmp_path / "real", CASES[case])[0]
    found = run_small(tmp_path / "rehearsed", **CASES[case], **rehearsed(ranks)).summary
    assert found["weights_sha256"] == there["weights_sha256"]
    assert found["world_size"] == there["world_size"] == ranks
    assert found["top1"] == there["top1"]
    assert found["val_loss"] == pytest.approx(there["val_loss"], rel=1e-6)
    # Batch norm is each rank's own, and the checkpoint has them all.
    ours, theirs = last(tmp_path / "rehearsed").batch_norm, last(tmp_path / "real").batch_norm
    assert torch.equal(ours["rows"], theirs["rows"])
    assert torch.equal(ours["tracked"], theirs["tracked"])


def test_a_rehearsal_resumes_bit_identically_and_its_clock_goes_on(tmp_path: Path) -> None:
    values = {**rehearsed(4, profile=profile(tmp_path), gpu="H100"), **EVERY_STEP}
    whole = run_small(tmp_path / "a", **values).summary
    stop_after(3, tmp_path / "b", **values)
    rest = run_small(tmp_path / "b", run__resume="auto", **values).summary
    assert rest["resumed_at_steps"] == [3]
    assert rest["weights_sha256"] == whole["weights_sha256"]
    assert rest["rehearsal"] == whole["rehearsal"]


def test_a_clock_counts_what_a_run_without_one_has_done(tmp_path: Path) -> None:
    clock: dict[str, Any] = {
        "run__rehearsal__profile": profile(tmp_path),
        "run__rehearsal__gpu": "H100",
    }
    whole = run_small(tmp_path / "a", **rehearsed(4), **clock, **EVERY_STEP).summary
    stop_after(5, tmp_path / "b", **rehearsed(4), **EVERY_STEP)
    rest, events = watched(
        tmp_path / "b", run__resume="auto", **rehearsed(4), **clock, **EVERY_STEP
    )
    missing_s = whole["rehearsal"]["predicted_s"] - rest.summary["rehearsal"]["predicted_s"]
    assert missing_s == pytest.approx(whole["rehearsal"]["eval_s"])
    notes = [event.text for event in events if isinstance(event, NoteEvent)]
    assert any("5 steps count" in text for text in notes)


FULL_GRADIENTS: dict[str, Any] = {
    "optim__name": "svrg", "optim__momentum": 0.0, "data__augment": "none", "data__flip": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("wire", "values"),
    [
        ("int8", {**rehearsed(1)}),
        ("int8", {"run__noise_scale": True}),
        ("int8", FULL_GRADIENTS),
        ("float16", FULL_GRADIENTS),
    ],
)
def test_wires_of_a_plan_are_refused_as_those_of_the_settings(
    tmp_path: Path, wire: str, values: dict[str, Any]
) -> None:
    """They are known only once the plan file is read."""
    with refused("comm.plan", wire):
        run_small(tmp_path / "a", comm__plan=tiny_plan(wire, tmp_path, 1), **values)


def test_the_cluster_continues_what_was_rehearsed(tmp_path: Path) -> None:
    """A checkpoint of virtual ranks is that of as many real ones."""
    whole = run_small(tmp_path / "a", **rehearsed(2), **EVERY_STEP).summary
    saved = str(tmp_path / "a/checkpoints/step-00000003.pt")
    found = run_on_ranks(2, tmp_path / "b", {"run__resume": saved})
    assert {one["weights_sha256"] for one in found} == {whole["weights_sha256"]}


def profile(folder: Path, image_size: int = 12, prefix: str = "") -> str:
    """A step of resnet_tiny as `paceline profile` would have measured it."""
    from paceline.models.registry import create_model
    from paceline.models.settings import ModelSettings
    from paceline.plan.optimizer import Gradient
    from paceline.plan.plan_file import PlanFile
    from paceline.planner.workload import Affine, Workload

    net = create_model(
        ModelSettings(name="resnet_tiny"), num_classes=4, in_channels=1, image_size=12
    )
    names = [(name, p.numel()) for name, p in net.named_parameters()]
    gradients = tuple(
        Gradient(prefix + name, size, False, (at + 1) / len(names))
        for at, (name, size) in enumerate(reversed(names))
    )
    work = Workload(
        "resnet_tiny", gradients, Affine(0.001, 1e-4), Affine(0.002, 2e-4), 0.001,
        image_size=image_size,
    )  # fmt: skip
    path = folder / "profile.toml"
    PlanFile(workload=work.to_section()).write(path)
    return str(path)


def test_the_clock_advances_by_the_predicted_times(tmp_path: Path) -> None:
    outcome, events = watched(
        tmp_path / "a",
        **rehearsed(
            4, profile=profile(tmp_path), gpu="H100", startup_s=7.0, eval_s=3.0,
            price_per_gpu_hour=2.0,
        ),
    )  # fmt: skip
    found = outcome.summary["rehearsal"]
    steps = [event for event in events if isinstance(event, StepEvent)]
    evals = [event for event in events if isinstance(event, EvalEvent)]
    assert steps[0].fields["predicted_s"] == pytest.approx(7.0 + found["step_s"])
    assert evals[-1].fields["predicted_s"] == pytest.approx(7.0 + 7 * found["step_s"] + 2 * 3.0)
    assert found["predicted_s"] == evals[-1].fields["predicted_s"]
    assert found["gpu_hours"] == pytest.approx(4 * found["predicted_s"] / 3600)
    assert found["cost"] == pytest.approx(2 * found["gpu_hours"])
    assert found["energy_kwh"] == pytest.approx(0.7 * found["gpu_hours"])
    run = RunFiles.read(tmp_path / "a")
    labels = dict(summary_rows(run))
    assert labels["ranks (virtual)"] == "4"
    assert "cluster's cost" in labels
    assert "4 virtual ranks, cluster's time (predicted)" in verdict(run)
    assert "Accuracy over the cluster" in (tmp_path / "a/report.html").read_text()


@pytest.mark.parametrize(("image_size", "prefix"), [(32, ""), (12, "net.")])
def test_a_profile_of_other_images_or_another_model_is_refused(
    tmp_path: Path, image_size: int, prefix: str
) -> None:
    path = profile(tmp_path, image_size, prefix)
    with refused("run.rehearsal.profile"):
        run_small(tmp_path / "a", **rehearsed(4, profile=path, gpu="H100"))


def test_the_clock_is_of_the_format_that_runs(tmp_path: Path) -> None:
    """`auto` on a CPU trains in fp32 and sends fp32, whatever a GPU would choose."""
    given: dict[str, Any] = rehearsed(
        1, nodes=2, gpu="H100", node_gbps=0.1, profile=profile(tmp_path)
    ) | {"run__epochs": 1}
    steps = {}
    for dtype in ("auto", "fp32", "bf16"):
        outcome, _ = watched(tmp_path / dtype, **given, precision__amp_dtype=dtype)
        steps[dtype] = outcome.summary["rehearsal"]["step_s"]
    assert steps["auto"] == steps["fp32"] > 1.5 * steps["bf16"]


def test_a_model_that_the_planner_does_not_know_is_counted(tmp_path: Path) -> None:
    """Without a profile the clock has a step, and counting changes no bit of the training."""
    given: dict[str, Any] = {**rehearsed(4), "run__epochs": 1}
    plain = run_small(tmp_path / "plain", **given).summary
    outcome, events = watched(tmp_path / "timed", **given, run__rehearsal__gpu="H100")
    start = events[0]
    assert "layers of the network, counted from a trace, on H100" in start.chosen["clock"]
    assert outcome.summary["weights_sha256"] == plain["weights_sha256"]
    found = outcome.summary["rehearsal"]
    assert 0 < found["step_s"] < 0.1
    assert found["energy_kwh"] > 0


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"run__rehearsal__profile": "missing.toml"}, "run.rehearsal.profile"),
        ({"run__rehearsal__nodes": -1}, "run.rehearsal.nodes"),
        ({"run__rehearsal__nodes": 5000}, "run.rehearsal.nodes"),
        ({"run__rehearsal__node_gbps": 0.0}, "run.rehearsal.node_gbps"),
        ({"run__rehearsal__eval_s": -1.0}, "run.rehearsal.eval_s"),
        ({"run__rehearsal__nodes": 0}, "run.rehearsal.nodes"),
        ({"run__traced_steps": (1, 2)}, "run.traced_steps"),
        ({"comm__wire": "int8"}, "comm.wire"),
        ({"optim__batch_schedule": "1:2"}, "optim.batch_schedule"),
        ({**FULL_GRADIENTS}, "run.strategy"),
        ({"run__global_batch_size": 7}, "run.global_batch_size"),
        ({"run__rehearsal__nodes": 300}, "run.rehearsal.nodes"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, values: dict[str, Any], field: str) -> None:
    with refused(field):
        run_small(tmp_path / "a", **(rehearsed(4) | values))


def _nested(rank: int, folder: str) -> str:
    try:
        run_small(folder, **rehearsed(2))
    except ConfigError as error:
        return error.field
    return ""


def test_a_rehearsal_on_several_processes_is_refused(tmp_path: Path) -> None:
    assert run_ranks(2, _nested, str(tmp_path / "a")) == ["run.strategy"] * 2


def test_statistics_of_virtual_ranks_are_apart() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3))
    state = VirtualStatistics(net, 2)
    for rank in range(2):
        state.load(rank)
        net(torch.randn(8, 3) + 10 * rank)
        state.store(rank)
    assert not torch.allclose(state.kept[0], state.kept[1])
    state.remember()
    state.load(0)
    net(torch.full((8, 3), float("nan")))
    state.store(0)
    state.discard_if(torch.ones(()))
    assert torch.isfinite(state.kept).all()
    assert torch.equal(state.average(None), pool(state.kept))  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["native", "hierarchical"])
def test_a_rehearsal_on_a_gpu_is_captured_and_close_to_that_on_the_cpu(
    tmp_path: Path, algorithm: str
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    values = {**rehearsed(4), "run__epochs": 1, "comm__algorithm": algorithm}
    fp32: dict[str, Any] = {"precision__amp_dtype": "fp32", "data__image_size": 28}
    found, events = watched(
        tmp_path / "gpu", run__device="cuda", run__cuda_graphs="on", **values, **fp32
    )
    start = events[0]
    assert "CUDA graphs on" in start.chosen["speed"]
    expected = run_small(tmp_path / "cpu", **values, **fp32).summary
    assert found.summary["val_loss"] == pytest.approx(expected["val_loss"], rel=0.02)
    again, _ = watched(
        tmp_path / "eager", run__device="cuda", run__cuda_graphs="off", **values, **fp32
    )
    assert again.summary["val_loss"] == pytest.approx(found.summary["val_loss"], rel=0.01)
