"""Whole runs with each optimizer: resume, clipping, layer-wise decay, errors on all ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.config import load_config
from paceline.core.errors import CheckpointError, ConfigError, RunError
from paceline.core.events import StartEvent, StepEvent
from paceline.optim.build import layer_numbers, with_layer_decay
from paceline.optim.settings import OptimSettings
from paceline.precision import PrecisionSettings
from paceline.train import run_training
from paceline.train.components import Components
from small_runs import Silent, run_small, small_config
from train.runs import EVERY_STEP, stop_after, watched
from train.steps import Made, alone, make_step, same, snapshot

ADAM: dict[str, Any] = {"optim__name": "adamw", "optim__lr": 3e-3}
CLASS: dict[str, Any] = {
    "optim__name": "torch.optim:RAdam", "optim__lr": 3e-3,
    "optim__arguments": "{betas = [0.8, 0.95]}",
}  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [
        ADAM | {"precision__amp_dtype": "bf16", "optim__clip_norm": 0.5},
        ADAM | {"optim__name": "lamb", "optim__layer_decay": 0.7},
        CLASS | {"precision__amp_dtype": "bf16", "optim__layer_decay": 0.7},
    ],
    ids=["adamw", "lamb", "radam"],
)
def test_a_resumed_run_ends_with_the_same_bits(values: dict[str, Any], tmp_path: Path) -> None:
    whole, events = watched(tmp_path / "whole", **values)
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert steps[-1].loss < steps[0].loss
    assert all(bool(event.grad_norm) == ("optim__clip_norm" in values) for event in steps)
    stop_after(3, tmp_path / "cut", **values)
    again = run_small(tmp_path / "cut", run__resume="auto", **values)
    assert again.summary["resumed_at_steps"] == [3]
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]
    (start,) = [event for event in events if isinstance(event, StartEvent)]
    note = start.chosen["optimizer"]
    if "optim__layer_decay" in values:
        assert "5 layer rates from 0.24 to 1 of the schedule's" in note
        stop_after(3, tmp_path / "other", **(values | {"optim__layer_decay": 1.0}))
        with pytest.raises(CheckpointError, match=r"parameter groups differ; see optim\.layer"):
            run_small(tmp_path / "other", run__resume="auto", **values)
    if values["optim__name"] == CLASS["optim__name"]:
        assert note.startswith("radam, masters around torch's own, update not captured")


def test_a_function_that_makes_the_optimizer(tmp_path: Path) -> None:

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.NAdam(groups, lr=1.0)

    def run(output: Path, **values: Any) -> Any:
        config = small_config(output, optim__lr=3e-3, **values)
        return run_training(config, Silent, components=Components(optimizer=make))

    whole = run(tmp_path / "whole", **EVERY_STEP)
    first = sorted((tmp_path / "whole" / "checkpoints").glob("step-*.pt"))[2]
    again = run(tmp_path / "again", run__resume=str(first))
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]

    def forgetful(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups[:1], lr=1.0)

    with pytest.raises(ConfigError, match="optimizer"):
        run_training(
            small_config(tmp_path / "less"), Silent, components=Components(optimizer=forgetful)
        )


class FailsLater(torch.optim.SGD):
    """An own class that was never tried for long."""

    taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        if self.taken == 4:
            raise IndexError("no such moment")
        return super().step(closure)


def test_an_optimizer_that_fails_in_a_later_step_is_one_line(tmp_path: Path) -> None:
    given = Components(optimizer=lambda groups: FailsLater(groups, lr=0.1))
    config = small_config(tmp_path / "run", **EVERY_STEP)
    with pytest.raises(
        RunError, match="the optimizer failed in step [34]: IndexError: no such mom"
    ):
        run_training(config, Silent, components=given)
    assert list((tmp_path / "run" / "checkpoints").glob("step-*.pt"))


# --- clipping ----------------------------------------------------------------------------------


def clipped_step(norm: float, dtype: str = "fp32", **optim: Any) -> Any:
    settings = OptimSettings.gather(
        **{"name": "sgd", "lr": 0.1, "weight_decay": 0.0, "warmup_epochs": 0.0, "clip_norm": norm}
        | optim
    )
    scale = PrecisionSettings(loss_scale_init=1024.0)
    return make_step(alone(), made=Made(dtype=dtype, optim=settings, precision=scale, epochs=3))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_clipping_is_torchs(dtype: str) -> None:
    """The norm of all gradients, unscaled, after their mean; the update is that of clipped ones."""
    plain, clipped, loose = (clipped_step(norm, dtype) for norm in (0.0, 0.05, 1e6))
    before = [m.detach().clone() for m in plain.optimizer.masters()]
    outcomes = [step.run(0, 0.1) for step in (plain, clipped, loose)]
    moves = [
        torch.cat([
            (b - m.detach()).flatten()
            for b, m in zip(before, step.optimizer.masters(), strict=True)
        ])
        for step in (plain, clipped, loose)
    ]  # fmt: skip
    norm = float(moves[0].norm()) / 0.1
    assert outcomes[1].grad_norm == pytest.approx(norm, rel=1e-3)
    assert norm > 0.05
    torch.testing.assert_close(moves[1], moves[0] * (0.05 / norm), rtol=1e-3, atol=1e-7)
    assert float(moves[1].norm()) == pytest.approx(0.1 * 0.05, rel=1e-3)
    assert torch.equal(moves[2], moves[0]), "a norm below the limit changes no bit"


@pytest.mark.parametrize("name", ["sgd", "lars", "muon", "adamw", "lamb", "torch.optim:RAdam"])
def test_clipping_goes_with_a_skipped_step(name: str) -> None:
    step = clipped_step(0.05, name=name)
    net = step.model
    step.run(0, 0.01)
    before = snapshot(step)
    net.poison = float("nan")
    outcome = step.run(1, 0.01)
    assert outcome.skipped
    assert set(outcome.bad) == {"conv.weight", "conv.bias", "fc.weight", "fc.bias"}
    assert same(snapshot(step), before)


# --- rates of layers ----------------------------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)


def test_layers_of_a_model_and_their_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Blocks()
    numbers = layer_numbers(model)
    found = [numbers[name] for name, _ in model.named_parameters()]
    assert found == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    weights = [p for name, p in model.named_parameters() if name.endswith("weight") and p.dim() > 1]
    groups = with_layer_decay([{"params": weights, "weight_decay": 0.1}], model, 0.5)
    assert [group["lr_scale"] for group in groups] == [0.0625, 0.125, 0.25, 0.5, 1.0]
    assert [p for group in groups for p in group["params"]] == weights
    own = [{"params": weights}]
    assert with_layer_decay(own, model, 1.0) == own
    with pytest.raises(ConfigError):
        with_layer_decay(own, nn.Linear(2, 2), 0.5)

    def matcher(coarse: bool = False) -> dict[str, str]:
        return {"stem": "^stem", "blocks": r"^blocks\.(\d+)"}

    def group_parameters(module: nn.Module, matched: Any, reverse: bool) -> dict[str, int]:
        assert reverse
        assert matched == matcher()
        return {name: 7 if name.startswith("head") else 3 for name, _ in module.named_parameters()}

    model.group_matcher = matcher  # type: ignore[assignment]
    fake = type(sys)("timm.models")
    fake.group_parameters = group_parameters  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", type(sys)("timm"))
    monkeypatch.setitem(sys.modules, "timm.models", fake)
    assert set(layer_numbers(model).values()) == {0, 1}


# --- settings -----------------------------------------------------------------------------------


def test_rates_of_adam_do_not_come_from_a_recipe_of_sgd() -> None:
    def peak(**values: Any) -> float:
        named = {f"optim.{name}": value for name, value in values.items()}
        return load_config("cifar10-resnet18", named).optim.peak_lr(512)

    assert peak() == pytest.approx(0.4)
    assert peak(name="lars") == pytest.approx(0.4)
    assert peak(name="adamw") == pytest.approx(5e-4)
    assert peak(name="lamb", lr=0.01) == 0.01
    assert peak(name="adamw", lr_base=1e-3) == pytest.approx(2e-3)
    with pytest.raises(ConfigError, match=r"optim\.lr: .*torch\.optim:RAdam"):
        peak(name="torch.optim:RAdam")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "adamv"}, "did you mean 'adamw'.*a class is written"),
        ({"name": "torch.optim:"}, "is not of the form module:name"),
        ({"arguments": "{a = 1}"}, "sgd takes none"),
        ({"name": "a:B", "lr": 1.0, "arguments": "{a = }"}, "is not TOML"),
        ({"name": "a:B", "lr": 1.0, "arguments": "3"}, "is not a table"),
        ({"name": "a:B", "lr": 1.0, "fused": "triton"}, "no kernels"),
        ({"clip_norm": -1.0}, "must be 0 or more"),
        ({"layer_decay": 0.0}, r"must be in \(0, 1\]"),
    ],
)
def test_settings_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimSettings.gather(**values)
