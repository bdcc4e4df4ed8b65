"""The average of the last steps' weights: what is in it, who sees it, and that it comes back."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.core.errors import ConfigError
from paceline.core.events import EvalEvent
from paceline.precision.settings import PrecisionSettings
from paceline.train.checkpoint import Checkpoint, content_hash
from paceline.train.run import run_training
from paceline.train.step import TrainStep
from paceline.train.weight_average import WeightAverage, applied
from paceline.train.weights_file import checkpoint_weights
from ranks import run_ranks
from small_runs import Silent, run_small, small_config
from train.steps import Made, Net, alone, make_step, same, snapshot
from train.test_resume import stop_after

DTYPES = ("fp32", "fp16", "bf16")
AVERAGED: dict[str, Any] = {"run__average_epochs": 1.0, "run__epochs": 3, "optim__lr": 0.2}


def made_step(dtype: str = "fp32", steps: float = 3.0, model: nn.Module | None = None) -> TrainStep:
    scale = PrecisionSettings(loss_scale_init=1024.0)
    made = Made(epochs=4, dtype=dtype, precision=scale, average=steps)
    return make_step(alone(), model=model, made=made, norm=True)


def average_of(step: TrainStep) -> WeightAverage:
    assert step.update.average is not None
    return step.update.average


def masters_and_statistics(step: TrainStep) -> Tensor:
    masters = [m.detach().double().flatten() for m in step.update.optimizer.masters()]
    return torch.cat([*masters, step.batch_norm.flat.double().flatten()])


def averaged(step: TrainStep) -> Tensor:
    average = average_of(step)
    return torch.cat([v.flatten() for v in (*average.weights, average.statistics)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_mean_at_first_and_then_forgets_exponentially(dtype: str) -> None:
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
    assert float((seen[-1] - expected).abs().max()) > 1e-3, "they must differ to be told apart"


@pytest.mark.parametrize("dtype", DTYPES)
def test_training_does_not_see_it(dtype: str) -> None:
    plain, with_average = made_step(dtype, steps=0.0), made_step(dtype)
    for number in range(4):
        first, second = plain.run(number, 0.1), with_average.run(number, 0.1)
        assert first.loss == second.loss
    assert same(snapshot(plain), snapshot(with_average))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_holds_it_only_within_the_context(dtype: str) -> None:
    step = made_step(dtype)
    for number in range(4):
        step.run(number, 0.1)
    before = snapshot(step)
    average = average_of(step)
    with average.applied():
        parameters = [p for g in step.update.optimizer.param_groups for p in g["params"]]
        for parameter, weights in zip(parameters, average.weights, strict=True):
            assert torch.equal(parameter, weights.to(parameter.dtype))
        assert torch.equal(step.batch_norm.flat, average.statistics)
        assert not same(before, snapshot(step))
    assert same(before, snapshot(step))
    with pytest.raises(RuntimeError, match="in the middle"), average.applied():
        raise RuntimeError("in the middle")
    assert same(before, snapshot(step))
    with applied(None):
        assert same(before, snapshot(step))


def test_a_step_of_which_nothing_remains_is_not_in_it() -> None:
    step = made_step()
    for number in range(2):
        step.run(number, 0.1)
    before, count = averaged(step).clone(), average_of(step).capture(step.group)["count"]
    step.stop.received = signal.SIGTERM
    assert not step.run(2, 0.1).done
    assert torch.equal(averaged(step), before)
    assert average_of(step).capture(step.group)["count"] == count == 2


def test_a_skipped_step_counts_with_the_weights_as_they_stayed() -> None:
    """All ranks skip, the schedule goes on, and so does the average."""
    model = Net(norm=True)
    step = made_step(steps=2.0, model=model)
    step.run(0, 0.1)
    first = masters_and_statistics(step)
    step.run(1, 0.1)
    second = masters_and_statistics(step)
    model.poison = float("inf")
    assert step.run(2, 0.1).skipped
    expected = (first + second) / 2
    expected += (second - expected) / 2
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
    average_of(fresh).restore(average.capture(step.group), step.group)
    assert torch.equal(averaged(fresh), averaged(step))


# --- whole runs --------------------------------------------------------------------------------------


def state_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "weights.safetensors")


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*.pt"))


def test_what_is_evaluated_exported_and_saved_is_the_average(tmp_path: Path) -> None:
    display = Silent()
    config = small_config(tmp_path / "a", **AVERAGED)
    outcome = run_training(config, lambda: display)
    plain = run_small(tmp_path / "b", **AVERAGED | {"run__average_epochs": 0.0})
    assert outcome.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert outcome.summary["val_loss"] != plain.summary["val_loss"]
    assert outcome.summary["chosen"]["average"] == (
        "over about 4 steps (1 epochs), for evaluation and export"
    )
    assert "average" not in plain.summary["chosen"]
    weights, checkpoint = state_of(tmp_path / "a"), Checkpoint.read(newest(tmp_path / "a"))
    assert weights.keys() == state_of(tmp_path / "b").keys()
    for name, value in checkpoint_weights(checkpoint).items():
        assert torch.equal(value, weights[name]), name
    assert not torch.equal(checkpoint.model["fc.weight"], weights["fc.weight"])
    assert torch.equal(checkpoint.model["fc.weight"], state_of(tmp_path / "b")["fc.weight"])
    arguments = ["eval", str(newest(tmp_path / "a")), "--device", "cpu", "--json"]
    found = json.loads(CliRunner().invoke(app, arguments).stdout)
    last = [event for event in display.events if isinstance(event, EvalEvent)][-1]
    assert found["loss"] == pytest.approx(last.loss, rel=1e-6)
    assert found["top1"] == last.top1
    out = tmp_path / "out.safetensors"
    CliRunner().invoke(app, ["export", str(newest(tmp_path / "a")), str(out)])
    for name, value in load_file(out).items():
        assert torch.equal(value, weights[name]), name


def test_a_resumed_run_ends_with_the_same_average(tmp_path: Path) -> None:
    run_small(tmp_path / "whole", **AVERAGED)
    stopped = stop_after(5, tmp_path / "a", **AVERAGED)
    assert stopped.result.stopped_by == "SIGTERM"
    run_small(tmp_path / "a", run__resume="auto", **AVERAGED)
    whole, rest = state_of(tmp_path / "whole"), state_of(tmp_path / "a")
    for name, value in whole.items():
        assert torch.equal(rest[name], value), name


def test_it_begins_with_the_weights_of_a_checkpoint_that_has_none(tmp_path: Path) -> None:
    off = AVERAGED | {"run__average_epochs": 0.0}
    every = {"checkpoint__interval_steps": 1, "checkpoint__keep": 99}
    run_small(tmp_path / "off", **off, **every)
    folder = tmp_path / "off/checkpoints"
    second_last, last = (folder / f"step-000000{number}.pt" for number in ("10", "11"))
    run_small(tmp_path / "on", run__resume=str(second_last), **AVERAGED)
    found = Checkpoint.read(newest(tmp_path / "on")).average
    assert found["count"] == 1
    expected = Checkpoint.read(last).model["fc.weight"]
    torch.testing.assert_close(found["weights"]["fc.weight"], expected, rtol=0, atol=1e-7)
    before = Checkpoint.read(second_last).model["fc.weight"]
    assert float((before - expected).abs().max()) > 1e-5
    # And the other way round: a run without one takes the last step's weights.
    run_small(tmp_path / "again", run__resume=str(newest(tmp_path / "on")), **off)
    assert Checkpoint.read(newest(tmp_path / "again")).average == {}


def test_a_checkpoint_from_before_is_read(tmp_path: Path) -> None:
    run_small(tmp_path / "a", run__epochs=1)
    table = torch.load(newest(tmp_path / "a"), weights_only=True)
    parts = {name: table[name] for name in Checkpoint.__dataclass_fields__ if name != "average"}
    head = {"format": table["format"], "version": 2, "sha256": content_hash(parts)}
    buffer = io.BytesIO()
    torch.save(head | parts, buffer)
    before = Checkpoint.from_bytes(buffer.getvalue(), Path("before.pt"))
    assert before.average == {}
    assert before.step == Checkpoint.read(newest(tmp_path / "a")).step


def _run(rank: int, output: str, resume: str) -> float:
    outcome = run_small(output, run__resume=resume, run__batch_size=8, **AVERAGED)
    return float(outcome.summary["val_loss"])


def test_ranks_average_alike_and_another_number_of_them_can_go_on(tmp_path: Path) -> None:
    run_small(tmp_path / "one", run__batch_size=8, **AVERAGED)
    losses = run_ranks(2, _run, str(tmp_path / "two"), "")
    assert losses[0] == losses[1]
    one, two = (Checkpoint.read(newest(tmp_path / name)) for name in ("one", "two"))
    assert two.average["rows"].shape[0] == 2
    assert not torch.equal(two.average["rows"][0], two.average["rows"][1])
    for name, value in one.average["weights"].items():
        torch.testing.assert_close(two.average["weights"][name], value, rtol=1e-3, atol=1e-4)
    stop_after(5, tmp_path / "half", run__batch_size=8, **AVERAGED)
    run_ranks(2, _run, str(tmp_path / "rest"), str(newest(tmp_path / "half")))
    rest = Checkpoint.read(newest(tmp_path / "rest")).average
    assert rest["count"] == one.average["count"]
    for name, value in one.average["weights"].items():
        torch.testing.assert_close(rest["weights"][name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_what_is_no_number_of_epochs_is_refused(tmp_path: Path, value: float) -> None:
    with pytest.raises(ConfigError, match=r"run\.average_epochs.*must be 0 \(off\) or more"):
        small_config(tmp_path, run__average_epochs=value)


def test_less_than_two_steps_are_refused(tmp_path: Path) -> None:
    words = (
        r"run\.average_epochs = 0\.5: is less than two steps \(3\.5 in an epoch.*at least 0\.571"
    )
    with pytest.raises(ConfigError, match=words):
        run_small(tmp_path / "a", run__average_epochs=0.5)
    assert not (tmp_path / "a").exists()
