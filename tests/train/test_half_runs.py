"""Whole runs in half precision: masters on disk, resuming, changing the format, evaluating."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.core.events import EvalEvent, Event, StepEvent
from paceline.train.checkpoint import Checkpoint, content_hash
from paceline.train.evaluate import EvalResult, evaluate_file
from paceline.train.run import RunOutcome, run_training
from small_runs import Silent, run_small, small_config
from train.test_resume import EVERY_STEP, stop_after

HALVES = ("fp16", "bf16")


def watched(output: Path, **values: Any) -> tuple[RunOutcome, list[Event]]:
    display = Silent()
    return run_training(small_config(output, **values), lambda: display), display.events


def last(folder: Path) -> Checkpoint:
    return Checkpoint.read(sorted((folder / "checkpoints").glob("step-*.pt"))[-1])


def state(checkpoint: Checkpoint) -> dict[str, str]:
    """A fingerprint of each part that training changes."""
    parts = {
        "masters": checkpoint.model,
        "statistics": checkpoint.batch_norm,
        "momenta": checkpoint.optimizer["state"],
        "loss scale": checkpoint.precision,
    }
    return {name: content_hash(value) for name, value in parts.items()}


@pytest.mark.parametrize(("dtype", "name"), [("fp16", "lars"), ("bf16", "lars"), ("fp16", "muon")])
def test_stop_and_resume_is_bit_identical(dtype: str, name: str, tmp_path: Path) -> None:
    # The scale moves in both halves: two overflows at first, then one growth every two steps.
    half: dict[str, Any] = {
        "precision__amp_dtype": dtype,
        "precision__loss_scale_interval": 2,
        "precision__loss_scale_init": 2.0**21,
        "optim__name": name,
        "optim__trust_coefficient": 0.02,
    }
    whole = run_small(tmp_path / "a", **half)
    assert whole.summary["steps"] == 7
    for step in (1, 3):
        parts = tmp_path / f"b{step}"
        assert stop_after(step, parts, **half).result.stopped_by == "SIGTERM"
        rest = run_small(parts, run__resume="auto", **half)
        assert rest.summary["weights_sha256"] == whole.summary["weights_sha256"]
        assert state(last(parts)) == state(last(tmp_path / "a"))
    scale = last(tmp_path / "a").precision
    assert scale["scale"] not in (2.0**21, 1.0) if dtype == "fp16" else scale["scale"] == 1.0


@pytest.mark.parametrize("dtype", HALVES)
def test_files_hold_fp32_masters(dtype: str, tmp_path: Path) -> None:
    run_small(tmp_path / "a", precision__amp_dtype=dtype)
    exported = load_file(tmp_path / "a/weights.safetensors")
    saved = last(tmp_path / "a").model
    kinds = {name: value.dtype for name, value in exported.items()}
    assert {kind for name, kind in kinds.items() if "tracked" not in name} == {torch.float32}
    for name, value in saved.items():
        assert torch.equal(exported[name], value), name
    weight = saved["layer3.1.conv1.weight"]
    assert not torch.equal(weight, weight.to(torch.float16).float()), "masters, not rounded weights"
    assert not any("master" in entry for entry in last(tmp_path / "a").optimizer["state"].values())


@pytest.mark.parametrize("dtype", HALVES)
def test_the_evaluation_in_a_run_is_that_of_its_checkpoint(dtype: str, tmp_path: Path) -> None:
    _, events = watched(tmp_path / "a", precision__amp_dtype=dtype, run__global_batch_size=64)
    inside = [event for event in events if isinstance(event, EvalEvent)][-1]
    (file,) = (tmp_path / "a/checkpoints").glob(f"step-*{inside.step}.pt")
    found, config, _ = evaluate_file(file, {}, 256)
    assert isinstance(found, EvalResult)
    assert config.precision.amp_dtype == dtype
    assert (found.top1, found.top5, found.samples) == (inside.top1, inside.top5, inside.samples)
    assert found.loss == pytest.approx(inside.loss, rel=1e-6)
    full, _, _ = evaluate_file(file, {"precision.amp_dtype": "fp32"}, 256)
    assert isinstance(full, EvalResult)
    assert full.loss != found.loss
    assert full.loss == pytest.approx(found.loss, rel=0.02)


@pytest.mark.parametrize(
    ("before", "after"), [("fp32", "bf16"), ("bf16", "fp32"), ("fp32", "fp16"), ("fp16", "bf16")]
)
def test_a_checkpoint_goes_on_in_another_format(before: str, after: str, tmp_path: Path) -> None:
    whole, _ = watched(tmp_path / "a", precision__amp_dtype=before, **EVERY_STEP)
    saved = tmp_path / "a/checkpoints/step-00000003.pt"
    rest, events = watched(
        tmp_path / "b", precision__amp_dtype=after, run__resume=str(saved), **EVERY_STEP
    )
    # The copy that the new folder begins with is the checkpoint, masters and momenta exact.
    copied = state(Checkpoint.read(tmp_path / "b/checkpoints/step-00000003.pt"))
    original = state(Checkpoint.read(saved))
    assert {name for name in copied if copied[name] != original[name]} <= {"loss scale"}
    note = f"precision.amp_dtype '{before}' → '{after}'"
    assert note in rest.summary["chosen"]["changed on resume"]
    assert rest.summary["steps"] == whole.summary["steps"] == 7
    assert not any(isinstance(e, StepEvent) and e.skipped for e in events)
    ours, theirs = last(tmp_path / "b").model, last(tmp_path / "a").model
    assert not torch.equal(ours["fc.weight"], theirs["fc.weight"])
    torch.testing.assert_close(ours["fc.weight"], theirs["fc.weight"], rtol=0.05, atol=0.02)


def test_the_schedule_goes_on_through_skipped_steps(tmp_path: Path) -> None:
    runs = {}
    for name, values in {
        "full": {"precision__amp_dtype": "fp32"},
        "skipping": {"precision__amp_dtype": "fp16", "precision__loss_scale_init": 2.0**24},
    }.items():
        outcome, events = watched(tmp_path / name, **values)
        runs[name] = [event for event in events if isinstance(event, StepEvent)]
        assert outcome.summary["skipped_steps"] == sum(step.skipped for step in runs[name])
    skipping = runs["skipping"]
    assert skipping[0].skipped
    assert [step.lr for step in skipping] == [step.lr for step in runs["full"]]
    assert [step.step for step in skipping] == list(range(1, 8))
    scale = 2.0**24
    for step in skipping:
        assert step.loss_scale == scale
        scale = scale / 2 if step.skipped else scale
