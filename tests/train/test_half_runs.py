"""Half precision and Muon, in steps and whole runs: ranks, masters on disk, resuming, other formats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.core.errors import CheckpointError, PacelineError
from paceline.core.events import EvalEvent, StepEvent
from paceline.optim.rule_settings import MuonSettings
from paceline.precision.settings import PrecisionSettings
from paceline.train import Checkpoint, evaluate_file, master_weights, step_parts
from paceline.train.checkpoint import content_hash
from ranks import run_ranks
from small_runs import run_small
from train.runs import EVERY_STEP, last, stop_after, watched
from train.steps import OPTIM, Made, alone, joined, make_step, train

MUON = replace(
    OPTIM, name="muon", weight_decay=1e-3, nesterov=True,
    owned={"muon": MuonSettings(trust_coefficient=0.05)},
)  # fmt: skip
RUN: dict[str, Any] = {"optim__name": "muon", "optim__muon__trust_coefficient": 0.05}


def state(checkpoint: Checkpoint) -> dict[str, str]:
    """A digest of each part that training changes."""
    parts = {
        "masters": checkpoint.model,
        "statistics": checkpoint.batch_norm,
        "momenta": checkpoint.optimizer["state"],
        "loss scale": checkpoint.precision,
    }
    return {name: content_hash(value) for name, value in parts.items()}


@pytest.mark.parametrize(("dtype", "name"), [("fp16", "lars"), ("bf16", "lars"), ("fp16", "muon")])
def test_stop_and_resume_is_bit_identical(
    dtype: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrecisionSettings, "SCALE_INTERVAL", 2)
    # The scale changes in both parts: two overflows at first, then a growth every two steps.
    half: dict[str, Any] = {
        "precision__amp_dtype": dtype,
        "precision__loss_scale_init": 2.0**21,
        "optim__name": name,
        "optim__muon__trust_coefficient": 0.02,
    }
    whole = run_small(tmp_path / "a", **half)
    assert whole.summary["steps"] == 7
    assert stop_after(3, tmp_path / "b", **half).result.stopped_by == "SIGTERM"
    rest = run_small(tmp_path / "b", run__resume="auto", **half)
    assert rest.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert state(last(tmp_path / "b")) == state(last(tmp_path / "a"))
    scale = last(tmp_path / "a").precision["scale"]
    assert scale not in (2.0**21, 1.0) if dtype == "fp16" else scale == 1.0


@pytest.fixture(scope="module", params=["fp16", "bf16"])
def half_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, EvalEvent]:
    """Format, folder and last evaluation of a run in half precision."""
    folder = tmp_path_factory.mktemp("half") / "run"
    values = {"precision__amp_dtype": request.param, "run__global_batch_size": 64}
    _, events = watched(folder, **values)
    return request.param, folder, [e for e in events if isinstance(e, EvalEvent)][-1]


def test_files_hold_fp32_masters(half_run: tuple[str, Path, EvalEvent]) -> None:
    _, folder, _ = half_run
    exported, saved = load_file(folder / "weights.safetensors"), last(folder)
    kinds = {value.dtype for name, value in exported.items() if "tracked" not in name}
    assert kinds == {torch.float32}
    for name, value in saved.model.items():
        assert torch.equal(exported[name], value), name
    weight = saved.model["layer3.1.conv1.weight"]
    assert not torch.equal(weight, weight.to(torch.float16).float()), "masters, not rounded weights"
    assert not any("master" in entry for entry in saved.optimizer["state"].values())


def test_the_evaluation_of_a_run_is_that_of_its_checkpoint(
    half_run: tuple[str, Path, EvalEvent],
) -> None:
    dtype, folder, inside = half_run
    (file,) = (folder / "checkpoints").glob(f"step-*{inside.step}.pt")
    found, config, _ = evaluate_file(file, {}, 256)
    assert config.precision.amp_dtype == dtype
    assert (found.top1, found.top5, found.samples) == (inside.top1, inside.top5, inside.samples)
    assert found.loss == pytest.approx(inside.loss, rel=1e-6)
    full, _, _ = evaluate_file(file, {"precision.amp_dtype": "fp32"}, 256)
    assert full.loss != found.loss
    assert full.loss == pytest.approx(found.loss, rel=0.02)


@pytest.mark.parametrize(("before", "after"), [("fp32", "fp16"), ("fp16", "bf16")])
def test_a_checkpoint_is_resumed_in_another_format(before: str, after: str, tmp_path: Path) -> None:
    whole, _ = watched(tmp_path / "a", precision__amp_dtype=before, **EVERY_STEP)
    saved = tmp_path / "a/checkpoints/step-00000003.pt"
    rest, events = watched(
        tmp_path / "b", precision__amp_dtype=after, run__resume=str(saved), **EVERY_STEP
    )
    # The first checkpoint of the new folder is a copy, masters and momenta exact.
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


def test_the_schedule_continues_through_skipped_steps(tmp_path: Path) -> None:
    runs = {}
    for dtype in ("fp32", "fp16"):
        values = {"precision__amp_dtype": dtype, "precision__loss_scale_init": 2.0**24}
        outcome, events = watched(tmp_path / dtype, **values)
        runs[dtype] = [event for event in events if isinstance(event, StepEvent)]
        assert outcome.summary["skipped_steps"] == sum(step.skipped for step in runs[dtype])
    skipping, scale = runs["fp16"], 2.0**24
    assert skipping[0].skipped
    assert [step.lr for step in skipping] == [step.lr for step in runs["fp32"]]
    assert [step.step for step in skipping] == list(range(1, 8))
    for step in skipping:
        assert step.loss_scale == scale
        scale = scale / 2 if step.skipped else scale


# --- Muon --------------------------------------------------------------------------------------


def made(micro: int = 12, dtype: str = "fp32", orthogonal: str = "filters") -> Made:
    return Made(
        micro, dtype=dtype, optim=replace(MUON, owned={"muon": MuonSettings(0.05, orthogonal)})
    )


class Mixed(nn.Module):
    """Linear layers before convolutions: the optimizer's groups reverse the order."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(12, 12)
        self.first = nn.Conv2d(1, 4, 3)
        self.turn = nn.Linear(10, 10)
        self.second = nn.Conv2d(4, 4, 3)
        self.fc = nn.Linear(256, 4)

    def forward(self, images: Tensor) -> Tensor:
        inner = self.turn(self.first(self.mix(images)).relu())
        return self.fc(self.second(inner).relu().flatten(1))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_masters_are_those_of_their_own_weights(dtype: str) -> None:
    torch.manual_seed(0)
    model = Mixed()
    drawn = {name: p.detach().clone() for name, p in model.named_parameters()}
    step = make_step(alone(), model=model, made=made(dtype=dtype))
    for name, master in master_weights(model, step.optimizer).items():
        assert torch.equal(master, drawn[name]), name
    assert not step.run(0, 0.1).skipped


def _train_on_rank(rank: int, how: Made) -> tuple[Tensor, list[float]]:
    with joined() as group:
        return train(group, made=how)


@pytest.mark.parametrize("orthogonal", ["filters", "all"])
@pytest.mark.parametrize(("ranks", "micro"), [(2, 6), (3, 2)])
def test_muon_on_many_ranks_equals_one_process(ranks: int, micro: int, orthogonal: str) -> None:
    whole, losses = train(alone(), made=made(orthogonal=orthogonal))
    results = run_ranks(ranks, _train_on_rank, made(micro, orthogonal=orthogonal))
    for trained, their_losses in results:
        assert torch.equal(trained, results[0][0])
        torch.testing.assert_close(trained, whole, rtol=1e-4, atol=1e-5)
        assert their_losses == pytest.approx(losses, rel=1e-4)


def test_a_run_with_muon_pins_what_is_orthogonal(tmp_path: Path) -> None:
    done = run_small(tmp_path / "run", **RUN)
    assert done.summary["chosen"]["optimizer"] == "muon, foreach"
    assert done.summary["skipped_steps"] == 0
    with pytest.raises(CheckpointError, match=r"has optim\.muon\.orthogonal = 'filters'"):
        run_small(tmp_path / "run", **RUN, run__resume="auto", optim__muon__orthogonal="all")


def _on_other_devices(rank: int, output: str) -> str:
    with (
        patch.object(step_parts, "_computing_device", lambda device: f"GPU {rank}"),
        pytest.raises(PacelineError) as caught,
    ):
        run_small(output, **RUN)
    return str(caught.value)


def test_muon_refuses_ranks_on_different_devices(tmp_path: Path) -> None:
    """Their products of matrices would differ in the last bits."""
    for line in run_ranks(2, _on_other_devices, str(tmp_path / "run")):
        assert "'GPU 0' on rank 0, 'GPU 1' on rank 1" in line
        assert "or use lars" in line
