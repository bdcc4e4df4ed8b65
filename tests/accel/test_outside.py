"""An acceleration from outside the package: a fused block in one class, registered under a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.errors import ConfigError
from paceline.models import register_acceleration
from paceline.models.acceleration import AccelerationContext, Applied, Ranks, TrialPass
from paceline.models.resnet import SmallResNet
from refusals import refused
from small_runs import run_small


@dataclass
class FusedStem(Applied):
    """The first convolution with its norm and ReLU as one function, here of torch's operators."""

    model: SmallResNet
    calls: int = 0
    calibrated: bool = False

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        net = self.model
        x = F.relu(net.bn1(net.conv1(images)), inplace=True)
        return net.head(net.layer3(net.layer2(net.layer1(x))))

    def calibrate(self, ranks: Ranks, trial: TrialPass, *, foreign: bool) -> None:
        ranks.agree_on("trial of the stem", lambda: trial(self.forward))
        self.calibrated = ranks.all_gather(foreign) == [False]

    def describe(self) -> str:
        return "fused stem"


class Stems:
    def __init__(self) -> None:
        self.applied: list[FusedStem] = []

    def supports(self, model: nn.Module, context: AccelerationContext) -> str:
        return "" if isinstance(model, SmallResNet) else "needs resnet_tiny"

    def apply(self, model: nn.Module, context: AccelerationContext) -> FusedStem:
        self.applied.append(FusedStem(model))
        return self.applied[-1]


@pytest.fixture
def stems(registrations: None) -> Stems:
    register_acceleration("stems", made := Stems())
    return made


def test_a_registered_acceleration_computes_the_steps(tmp_path: Path, registrations: None) -> None:
    plain = run_small(tmp_path / "plain", run__epochs=1).summary
    register_acceleration("stems", stems := Stems())
    ours = run_small(tmp_path / "ours", run__epochs=1, run__accel__recompute_norms=True).summary
    (applied,) = stems.applied
    assert applied.calibrated
    assert applied.calls > 1
    assert "fused stem" in ours["chosen"]["speed"]
    assert "run.accel without effect with stems" in ours["chosen"]["speed"]
    assert ours["weights_sha256"] == plain["weights_sha256"]


def test_what_it_does_not_support_is_left_to_the_next_one(tmp_path: Path, stems: Stems) -> None:
    found = run_small(
        tmp_path / "run", run__epochs=1, model__name="resnet_fast",
        run__accel__recompute_norms=True,
    ).summary  # fmt: skip
    assert stems.applied == []
    assert "norms recomputed" in found["chosen"]["speed"]


class Doubled(Applied):
    """The least that an acceleration needs."""

    def __init__(self, model: nn.Module) -> None:
        self.forward = model.forward


def answers(reason: Any, made: Callable[[nn.Module], Any]) -> SimpleNamespace:
    return SimpleNamespace(supports=lambda *_: reason, apply=lambda model, _: made(model))


@pytest.mark.usefixtures("registrations")
def test_a_forward_is_enough(tmp_path: Path) -> None:
    register_acceleration("doubled", answers("", Doubled))
    found = run_small(tmp_path, run__epochs=1).summary
    assert "Doubled" in found["chosen"]["speed"]


@pytest.mark.usefixtures("registrations")
@pytest.mark.parametrize(("reason", "made"), [(True, Doubled), (None, Doubled), ("", object())])
def test_what_it_returns_is_checked(tmp_path: Path, reason: Any, made: Any) -> None:
    register_acceleration("doubled", answers(reason, made if reason != "" else lambda _: made))
    with refused("acceleration"):
        run_small(tmp_path, run__epochs=1)


@pytest.mark.parametrize("given", [Stems, Stems.apply, SimpleNamespace(supports=print)])
def test_a_class_is_no_acceleration(given: Any) -> None:
    with pytest.raises(ConfigError):
        register_acceleration("stems", given)
