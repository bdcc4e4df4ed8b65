from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import faults
from paceline.core.errors import RunError
from paceline.core.events import Event, StepEvent
from paceline.models.resnet import SmallResNet
from paceline.precision.policy import choose_policy
from paceline.precision.settings import PrecisionSettings
from paceline.train.checkpoint import Checkpoint, CheckpointStore
from paceline.train.divergence import find_bad_layer
from paceline.train.loop import TrainingLoop
from paceline.train.run import run_training
from small_runs import Silent, run_small, small_config

FP16: dict[str, Any] = {"precision__amp_dtype": "fp16"}
# Gradients of any size overflow under it, in fp16; the loss does not.
HUGE = 2.0**40


def diverge(output: Path, **values: Any) -> tuple[str, list[StepEvent]]:
    """The line of the run that must not go on, and its steps."""
    display = Silent()
    with pytest.raises(RunError) as caught:
        run_training(small_config(output, **values), lambda: display)
    events: list[Event] = display.events
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    return str(caught.value), [event for event in events if isinstance(event, StepEvent)]


def test_a_loss_that_is_not_finite_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SmallResNet, "forward", SmallResNet.forward)
    faults.poison(1)
    line, steps = diverge(tmp_path / "a", run__epochs=4)
    assert line == (
        "diverged at step 1: the loss was not finite in 10 steps in a row; first in the gradient of "
        "fc.bias (38 of 38 tensors); lower --lr (now 0.05 at its peak) or lengthen --warmup-epochs"
    ), "there is no checkpoint yet to speak of"
    assert [step.skipped for step in steps] == [True] * 10


def test_a_limit_below_ten_counts_for_the_loss_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SmallResNet, "forward", SmallResNet.forward)
    faults.poison(3)
    line, steps = diverge(tmp_path / "a", run__max_skipped_steps=2)
    assert line.startswith("diverged at step 3: the loss was not finite in 2 steps in a row; ")
    assert [step.skipped for step in steps] == [False, False, True, True]


def test_an_overflow_at_the_lowest_loss_scale(tmp_path: Path) -> None:
    scale = {"precision__loss_scale_max": 2.0**28, "precision__loss_scale_init": 2.0**28}
    line, steps = diverge(tmp_path / "a", **FP16, **scale, precision__loss_scale_min=2.0**26)
    assert line.startswith(
        "diverged at step 1: gradients overflow even at the lowest loss scale, 6.71089e+07; "
        "first in the gradient of "
    )
    assert [step.loss_scale for step in steps] == [2.0**28, 2.0**27, 2.0**26]


def test_gradients_that_stay_not_finite_under_a_constant_scale(tmp_path: Path) -> None:
    line, steps = diverge(
        tmp_path / "a", **FP16, precision__loss_scale=HUGE, run__max_skipped_steps=3
    )
    assert re.match(
        r"diverged at step 1: gradients were not finite in 3 steps in a row; first in the gradient of "
        r"fc\.bias \(\d+ of 38 tensors\); ",
        line,
    )
    assert [step.skipped for step in steps] == [True] * 3


def test_skipped_steps_count_only_in_a_row(tmp_path: Path) -> None:
    """A scale that grows every step overflows now and then; training goes on."""
    outcome = run_small(
        tmp_path / "a", **FP16, run__max_skipped_steps=2, precision__loss_scale_interval=1,
        precision__loss_scale_init=2.0**17, precision__loss_scale_max=2.0**40, run__epochs=6,
    )  # fmt: skip
    assert outcome.summary["skipped_steps"] >= 3
    assert outcome.result.stopped_by == "finished"


def test_the_last_good_checkpoint_is_kept_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_small(tmp_path / "whole", run__epochs=4)
    with monkeypatch.context() as patched:
        patched.setattr(SmallResNet, "forward", SmallResNet.forward)
        faults.poison(4)
        # One is kept, and every step saves: those of the skipped steps must not push it out.
        keep = {"checkpoint__interval_steps": 1, "checkpoint__keep": 1}
        diverge(tmp_path / "a", run__max_skipped_steps=4, run__epochs=4, **keep)
    saved = sorted((tmp_path / "a/checkpoints").glob("step-*.pt"))
    assert [path.stem for path in saved] == ["step-00000003"]
    assert Checkpoint.read(saved[0]).progress["skipped_in_a_row"] == 0
    assert not (tmp_path / "a/summary.json").exists()
    mended = run_small(tmp_path / "a", run__resume=str(saved[0]), run__epochs=4)
    assert mended.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_a_save_that_was_put_off_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scale overflows at first; the save of step 1 comes with the first step that succeeds."""
    scale = {"precision__loss_scale_max": 2.0**40, "precision__loss_scale_init": 2.0**26}
    display = Silent()
    values = {**FP16, **scale, "run__epochs": 6, "checkpoint__keep": 9}
    saved: list[int] = []
    monkeypatch.setattr(
        TrainingLoop, "_save_is_due", lambda self, step: self._save_owed or step in (1, 21)
    )
    put = CheckpointStore.put

    def note(self: CheckpointStore, checkpoint: Checkpoint, **how: Any) -> Path:
        saved.append(checkpoint.step)
        return put(self, checkpoint, **how)

    monkeypatch.setattr(CheckpointStore, "put", note)
    run_training(
        small_config(tmp_path / "a", **values, checkpoint__keep_best=False), lambda: display
    )
    skipped = [e.step for e in display.events if isinstance(e, StepEvent) and e.skipped]
    assert skipped[:1] == [1]
    assert saved[0] == skipped[-1] + 1


def test_the_layer_is_named_where_weights_or_outputs_are_not_finite() -> None:
    model = SmallResNet()
    policy = choose_policy(PrecisionSettings(amp_dtype="fp32"), torch.device("cpu"))
    shape = (4, 1, 28, 28)
    assert find_bad_layer(model, policy, shape) == ""
    with torch.no_grad():
        model.layer2[0].conv2.weight.fill_(1e38)
        assert find_bad_layer(model, policy, shape) == "the output of layer2.0.conv2 is not finite"
        model.layer3[1].bn1.weight[3] = float("inf")
    assert find_bad_layer(model, policy, shape) == "the weight layer3.1.bn1.weight is not finite"
