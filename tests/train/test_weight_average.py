"""The average of the last steps' weights: what it contains, where it is used, and how it is
restored."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.core.errors import PacelineError
from paceline.core.events import EvalEvent
from paceline.precision import PrecisionSettings
from paceline.train import Checkpoint, TrainStep, checkpoint_weights, fingerprint
from paceline.train.batch_norm import pool
from paceline.train.weights import WeightAverage, applied
from ranks import run_ranks
from refusals import refused
from small_runs import run_small
from train.runs import last, newest, watched
from train.steps import Made, Net, alone, make_step, same, snapshot

dtypes = pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
AVERAGED: dict[str, Any] = {"run__average_epochs": 1.0, "run__epochs": 3, "optim__lr": 0.2}


def made_step(dtype: str = "fp32", steps: float = 3.0, model: nn.Module | None = None) -> TrainStep:
    scale = PrecisionSettings(loss_scale_init=1024.0)
    made = Made(epochs=4, dtype=dtype, precision=scale, average=steps)
    return make_step(alone(), model=model, made=made, norm=True)


def average_of(step: TrainStep) -> WeightAverage:
    assert step.strategy.average is not None
    return step.strategy.average


def masters_and_statistics(step: TrainStep) -> Tensor:
    masters = [m.detach().double().flatten() for m in step.optimizer.masters()]
    return torch.cat([*masters, step.batch_norm.flat.double().flatten()])


def averaged(step: TrainStep) -> Tensor:
    average = average_of(step)
    return torch.cat([v.flatten() for v in (*average.weights, average.statistics)])


@dtypes
def test_it_is_the_mean_at_first_and_then_decays_exponentially(dtype: str) -> None:
    step, seen = made_step(dtype, steps=3.0), []
    expected: Tensor | None = None
    for number in range(8):
        step.run(number, 0.1)
        seen.append(masters_and_statistics(step))
        if expected is None or number < 3:
            expected = torch.stack(seen).mean(0)
        else:
            expected = expected + (seen[-1] - expected) / 3
        torch.testing.assert_close(averaged(step).double(), expected, rtol=1e-5, atol=1e-6)
    assert float((seen[-1] - expected).abs().max()) > 1e-3, (
        "the average must differ from the last step"
    )


@dtypes
def test_training_never_uses_it_and_a_model_holds_it_only_inside_the_context(dtype: str) -> None:
    plain, step = made_step(dtype, steps=0.0), made_step(dtype)
    for number in range(4):
        assert plain.run(number, 0.1).loss == step.run(number, 0.1).loss
    before = snapshot(step)
    assert same(snapshot(plain), before)
    average = average_of(step)
    with average.applied():
        parameters = [p for g in step.optimizer.param_groups for p in g["params"]]
        for parameter, weights in zip(parameters, average.weights, strict=True):
            assert torch.equal(parameter, weights.to(parameter.dtype))
        assert torch.equal(step.batch_norm.flat, average.statistics)
        assert not same(before, snapshot(step))
    assert same(before, snapshot(step))
    with pytest.raises(RuntimeError, match="in the middle"), average.applied():
        raise RuntimeError("in the middle")
    with applied(None):
        assert same(before, snapshot(step))


def test_a_stopped_step_is_not_in_it() -> None:
    step = made_step()
    for number in range(2):
        step.run(number, 0.1)
    before, count = averaged(step).clone(), average_of(step).capture(step.group)["count"]
    step.stop.received = signal.SIGTERM
    assert not step.run(2, 0.1).done
    assert torch.equal(averaged(step), before)
    assert average_of(step).capture(step.group)["count"] == count == 2


def test_a_skipped_step_is_not_in_it() -> None:
    """Nor are the initial weights, where the first steps are skipped because of a high loss scale."""
    model = Net(norm=True)
    step = made_step(steps=3.0, model=model)
    model.poison = float("inf")
    assert step.run(0, 0.1).skipped
    model.poison = 0.0
    seen = []
    for number in (1, 2):
        step.run(number, 0.1)
        seen.append(masters_and_statistics(step))
    model.poison = float("inf")
    assert step.run(3, 0.1).skipped
    expected = torch.stack(seen).mean(0)
    torch.testing.assert_close(averaged(step).double(), expected, rtol=1e-6, atol=1e-7)


def test_frozen_and_shared_parameters_are_in_the_state_as_they_are() -> None:
    class Shared(Net):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.fc
            self.conv.weight.requires_grad_(False)

    model = Shared()
    step = made_step(model=model)
    for number in range(3):
        step.run(number, 0.1)
    average = average_of(step)
    saved = average.capture(step.group)["weights"]
    assert set(saved) == set(model.state_dict())
    assert torch.equal(saved["conv.weight"], model.conv.weight)
    assert torch.equal(saved["again.weight"], saved["fc.weight"])
    assert not torch.equal(saved["fc.weight"], model.fc.weight)
    fresh = made_step(model=Shared())
    average_of(fresh).restore(average.capture(step.group), torch.ones(1, 0), step.group)
    assert torch.equal(averaged(fresh), averaged(step))


# --- whole runs --------------------------------------------------------------------------------


def state_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "weights.safetensors")


def cli_eval(checkpoint: Path) -> dict[str, Any]:
    arguments = ["eval", str(checkpoint), "--device", "cpu", "--json"]
    return json.loads(CliRunner().invoke(app, arguments).stdout)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_evaluated_exported_and_saved_is_the_average(tmp_path: Path, dtype: str) -> None:
    settings = AVERAGED | {"precision__amp_dtype": dtype}
    outcome, events = watched(tmp_path / "a", **settings)
    plain = run_small(tmp_path / "b", **settings | {"run__average_epochs": 0.0})
    assert outcome.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert outcome.summary["val_loss"] != plain.summary["val_loss"]
    assert "about 4 steps (1 epochs)" in outcome.summary["chosen"]["average"]
    assert "average" not in plain.summary["chosen"]
    assert "average_sha256" not in plain.summary
    weights, checkpoint = state_of(tmp_path / "a"), last(tmp_path / "a")
    assert weights.keys() == state_of(tmp_path / "b").keys()
    for name, value in checkpoint_weights(checkpoint).items():
        assert torch.equal(value, weights[name]), name
    assert not torch.equal(checkpoint.model["fc.weight"], weights["fc.weight"])
    assert torch.equal(checkpoint.model["fc.weight"], state_of(tmp_path / "b")["fc.weight"])
    found = cli_eval(newest(tmp_path / "a"))
    inside = [event for event in events if isinstance(event, EvalEvent)][-1]
    assert found["loss"] == pytest.approx(inside.loss, rel=1e-6)
    assert (found["top1"], found["average_epochs"]) == (inside.top1, 1.0)
    out = tmp_path / "out.safetensors"
    assert CliRunner().invoke(app, ["export", str(newest(tmp_path / "a")), str(out)]).exit_code == 0
    for name, value in load_file(out).items():
        assert torch.equal(value, weights[name]), name
    names = [name for name in checkpoint.average["weights"] if name in weights]
    exported = fingerprint({name: weights[name] for name in names})
    assert outcome.summary["average_sha256"] == exported != outcome.summary["weights_sha256"]
    assert exported in (tmp_path / "a/report.html").read_text()
    for path in (out, tmp_path / "a/weights.safetensors"):
        with safe_open(path, "pt") as file:
            assert float(file.metadata()["average_epochs"]) == 1


def test_results_of_the_average_and_of_the_last_step_are_not_mixed(tmp_path: Path) -> None:
    """A finished run that is resumed with it on or off is evaluated again, and finds its own best."""
    off = AVERAGED | {"run__average_epochs": 0.0}
    figures = {
        name: run_small(tmp_path / name, **settings).summary
        for name, settings in (("on", AVERAGED), ("off", off))
    }
    assert figures["on"]["val_loss"] != figures["off"]["val_loss"]
    to_off = run_small(tmp_path / "b", run__resume=str(newest(tmp_path / "on")), **off).summary
    assert to_off["val_loss"] == figures["off"]["val_loss"]
    assert to_off["best_step"] == to_off["steps"]
    # The average starts with the checkpoint's weights.
    to_on = run_small(tmp_path / "c", run__resume=str(newest(tmp_path / "off")), **AVERAGED).summary
    assert to_on["val_loss"] == figures["off"]["val_loss"]
    same = run_small(tmp_path / "d", run__resume=str(newest(tmp_path / "on")), **AVERAGED).summary
    assert same["val_loss"] == figures["on"]["val_loss"]
    assert same["best_step"] == figures["on"]["best_step"]


def _run(rank: int, output: str, resume: str = "", every: int = 0) -> float:
    outcome = run_small(
        output, run__resume=resume, run__batch_size=8, checkpoint__interval_steps=every,
        checkpoint__keep=99, **AVERAGED,
    )  # fmt: skip
    return float(outcome.summary["val_loss"])


def test_ranks_average_alike_and_pool_their_statistics(tmp_path: Path) -> None:
    run_small(tmp_path / "one", run__batch_size=8, **AVERAGED)
    losses = run_ranks(2, _run, str(tmp_path / "two"))
    assert losses[0] == losses[1]
    one, two = last(tmp_path / "one"), last(tmp_path / "two")
    rows = two.average["rows"]
    assert rows.shape[0] == 2
    assert float((rows[0] - rows[1]).abs().max()) > 1e-3
    for name, value in one.average["weights"].items():
        torch.testing.assert_close(two.average["weights"][name], value, rtol=1e-3, atol=1e-4)
    exported = state_of(tmp_path / "two")
    for name, value in checkpoint_weights(two).items():
        torch.testing.assert_close(exported[name], value, rtol=1e-6, atol=1e-7)
    assert cli_eval(newest(tmp_path / "two"))["loss"] == pytest.approx(losses[0], rel=1e-5)


def test_as_many_ranks_go_on_exactly_and_others_with_what_they_have_in_common(
    tmp_path: Path,
) -> None:
    run_ranks(2, _run, str(tmp_path / "two"), "", 1)
    whole = last(tmp_path / "two").average
    fifth = tmp_path / "two/checkpoints/step-00000005.pt"
    run_ranks(2, _run, str(tmp_path / "rest"), str(fifth))
    rest = last(tmp_path / "rest").average
    assert torch.equal(rest["rows"], whole["rows"])
    assert torch.equal(rest["weights"]["fc.weight"], whole["weights"]["fc.weight"])
    # The checkpoint of two ranks on one, and vice versa: saved again before the first step.
    _run(0, str(tmp_path / "one"), str(fifth), 1)
    first = tmp_path / "one/checkpoints/step-00000005.pt"
    pooled = pool(Checkpoint.read(fifth).average["rows"])
    assert torch.equal(Checkpoint.read(first).average["rows"], pooled[None])
    run_ranks(2, _run, str(tmp_path / "again"), str(first), 1)
    again = Checkpoint.read(tmp_path / "again/checkpoints/step-00000005.pt").average
    assert torch.equal(again["rows"], torch.stack([pooled, pooled]))
    assert again["count"] == Checkpoint.read(fifth).average["count"] == 5


def _drifted(rank: int, output: str) -> str:
    add = WeightAverage.add

    def drift(self: WeightAverage, discard: Tensor) -> None:
        add(self, discard)
        self.weights[0].add_(1e-3 * rank)

    with patch.object(WeightAverage, "add", drift), pytest.raises(PacelineError) as caught:
        _run(rank, output)
    return str(caught.value)


def test_ranks_whose_averages_differ_fail(tmp_path: Path) -> None:
    for error in run_ranks(2, _drifted, str(tmp_path / "a")):
        assert "their average" in error


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan"), 0.5])
def test_a_number_of_epochs_that_cannot_be_used(tmp_path: Path, value: float) -> None:
    """0.5 epochs are less than two steps here, which is known once the data is open."""
    with refused("run.average_epochs"):
        run_small(tmp_path / "a", run__average_epochs=value)
    assert not (tmp_path / "a").exists()
