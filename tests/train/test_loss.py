"""Losses: their values, mixed and soft labels, evaluation, and own functions that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config import RunSettings
from paceline.core.errors import ConfigError, RunError
from paceline.core.events import EvalEvent, StartEvent, StepEvent
from paceline.train.components import Components
from paceline.train.loss import BinaryCrossEntropy, CrossEntropy, OwnLoss, create_loss
from small_runs import Silent, run_small
from train.runs import watched

OUTPUTS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 1, 0])
OWN = torch.tensor([1.0, 0.7, 0.2, 0.5, 0.9, 0.3])


def shares(smoothing: float = 0.0, own: Tensor | None = None) -> Tensor:
    """By loops, as the definition has it."""
    made = torch.full((6, 4), smoothing / 4)
    for i in range(6):
        share = 1.0 if own is None else float(own[i])
        made[i, LABELS[i]] += (1 - smoothing) * share
        made[i, LABELS[5 - i]] += (1 - smoothing) * (1 - share)
    return made


@pytest.mark.parametrize("own", [None, OWN], ids=["plain", "mixed"])
def test_integer_labels_and_shares_of_classes_give_the_same(own: Tensor | None) -> None:
    goal = shares(0.1, own)
    binary = F.binary_cross_entropy_with_logits(OUTPUTS, goal, reduction="none").mean(1).sum()
    softmax = -(goal * OUTPUTS.log_softmax(1)).sum()
    for loss, expected in ((BinaryCrossEntropy(0.1), binary), (CrossEntropy(0.1), softmax)):
        for targets in (LABELS, shares()):
            torch.testing.assert_close(loss.total(OUTPUTS.half().float(), targets, own), expected,
                                       rtol=1e-3, atol=1e-3)  # fmt: skip
            torch.testing.assert_close(loss.total(OUTPUTS, targets, own), expected)
        plain = type(loss)(0.0)
        torch.testing.assert_close(loss.evaluated(OUTPUTS, LABELS), plain.total(OUTPUTS, LABELS))


def test_an_own_function_returns_losses_or_their_mean() -> None:
    seen: list[Tensor] = []

    def each(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(targets)
        return F.cross_entropy(outputs, targets, reduction="none")

    expected = CrossEntropy().total(OUTPUTS, LABELS)
    torch.testing.assert_close(OwnLoss(each, "each").total(OUTPUTS, LABELS), expected)
    assert seen[-1] is LABELS
    mean = OwnLoss(F.cross_entropy, "mean")
    torch.testing.assert_close(mean.total(OUTPUTS.half(), LABELS), expected, rtol=1e-2, atol=1e-2)
    OwnLoss(each, "each", classes=4).total(OUTPUTS, LABELS, OWN)
    torch.testing.assert_close(seen[-1], shares(own=OWN))
    first = OwnLoss(lambda outputs, targets: F.cross_entropy(outputs["logits"], targets), "first")
    several = {"logits": OUTPUTS, "aux": [OUTPUTS.half()]}
    torch.testing.assert_close(first.total(several, LABELS), expected)


def test_losses_by_name() -> None:
    named = create_loss(RunSettings(loss="torch.nn.functional:cross_entropy"))
    expected = CrossEntropy().total(OUTPUTS, LABELS)
    torch.testing.assert_close(named.total(OUTPUTS, LABELS), expected)
    created = create_loss(RunSettings(loss="torch.nn:CrossEntropyLoss"))
    torch.testing.assert_close(created.total(OUTPUTS, LABELS), expected)
    for text, message in (
        ("bze", "did you mean 'bce'"),
        ("torch.nn.functional:cros_entropy", "did you mean"),
        ("no_such_module:loss", "there is no module"),
        ("torch:pi", "is not a function"),
        ("a b:c", "is not of the form"),
    ):
        with pytest.raises(ConfigError, match=message):
            create_loss(RunSettings(loss=text))


def wrong_shape(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")[:, None]


def detached(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.detach(), targets)


def not_a_tensor(outputs: Tensor, targets: Tensor) -> Any:
    return float(F.cross_entropy(outputs.detach(), targets))


def raising(outputs: Tensor, targets: Tensor) -> Tensor:
    raise KeyError("margin")


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise RuntimeError("no way back")


def no_way_back(outputs: Tensor, targets: Tensor) -> Tensor:
    return Once.apply(outputs)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (wrong_shape, r"returned shape \(16, 1\) for 16 samples; return one loss for each"),
        (detached, "the loss detached has no gradient"),
        (not_a_tensor, "returned float; return a float tensor"),
        (raising, "the loss raising failed \\(KeyError: 'margin'\\)"),
        (no_way_back, "the backward pass of the loss no_way_back failed .*no way back"),
    ],
)
def test_a_loss_that_cannot_be_used_ends_the_run_before_its_first_step(
    loss: Any, message: str, tmp_path: Path
) -> None:
    display = Silent()
    with pytest.raises(RunError, match=message) as caught:
        watched(tmp_path / "run", Components(loss=loss), display)
    assert "\n" not in str(caught.value)
    assert display.events == []
    assert not (tmp_path / "run").exists()


def test_runs_with_other_losses(tmp_path: Path) -> None:
    """The same function by another way gives the same weights; mixing and averages go with all."""
    plain: dict[str, Any] = {"run__smoothing": 0.0}
    one = run_small(tmp_path / "one", **plain)
    named = run_small(tmp_path / "named", run__loss="torch.nn.functional:cross_entropy", **plain)
    assert one.report is not None
    assert named.report is not None
    assert one.summary["val_loss"] == pytest.approx(named.summary["val_loss"], rel=1e-3)
    mixed: dict[str, Any] = {"run__mixup": 0.2, "run__cutmix": 1.0, "optim__lr": 0.5}
    _, events = watched(tmp_path / "bce", run__loss="bce", **mixed)
    losses = [event.loss for event in events if isinstance(event, StepEvent)]
    assert losses[-1] < losses[0] < 1.0
    (start,) = [event for event in events if isinstance(event, StartEvent)]
    assert start.chosen["loss"] == "bce, mean over classes"
    (*_, last) = [event for event in events if isinstance(event, EvalEvent)]
    assert 0 < last.loss < 1.0


def test_evaluation_reports_cross_entropy_where_an_own_loss_is_not_defined(tmp_path: Path) -> None:
    def in_training(outputs: Tensor, targets: Tensor) -> Tensor:
        if not outputs.requires_grad:
            raise ValueError("only in training")
        return F.cross_entropy(outputs, targets, reduction="none")

    _, events = watched(tmp_path, Components(loss=in_training), run__epochs=1)
    (start,) = [event for event in events if isinstance(event, StartEvent)]
    assert start.chosen["loss"].endswith("validation reports cross_entropy")
    (evaluated,) = [event for event in events if isinstance(event, EvalEvent)]
    assert evaluated.loss > 0
