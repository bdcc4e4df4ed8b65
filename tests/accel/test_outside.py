"""An acceleration from outside the package: a fused block in one class, registered under a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.extensions import Registry
from paceline.models import acceleration, register_acceleration
from paceline.models.acceleration import AccelerationContext, Forward, Ranks, TrialPass
from paceline.models.resnet import SmallResNet
from small_runs import run_small


@dataclass
class FusedStem:
    """The first convolution with its norm and ReLU as one function, here of torch's operators."""

    model: SmallResNet
    input_channels: int | None = None
    gradients_at_end: bool = False
    calls: int = 0
    calibrated: bool = False

    @property
    def forward(self) -> Forward:
        return self._forward

    def _forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        net = self.model
        x = F.relu(net.bn1(net.conv1(images)), inplace=True)
        return net.head(net.layer3(net.layer2(net.layer1(x))))

    def calibrate(self, ranks: Ranks, trial: TrialPass, *, foreign: bool) -> None:
        ranks.agree_on("trial of the stem", lambda: trial(self.forward))
        self.calibrated = ranks.all_gather(foreign) == [False]

    def describe(self) -> str:
        return "fused stem"

    def advise(self, error: Exception) -> Sequence[str]:
        return ()

    def undo(self) -> None:
        pass


class Stems:
    def __init__(self) -> None:
        self.applied: list[FusedStem] = []

    def supports(self, model: nn.Module, context: AccelerationContext) -> str:
        return "" if isinstance(model, SmallResNet) else "needs resnet_tiny"

    def apply(self, model: nn.Module, context: AccelerationContext) -> FusedStem:
        assert isinstance(model, SmallResNet)
        self.applied.append(FusedStem(model))
        return self.applied[-1]


@pytest.fixture
def stems(monkeypatch: pytest.MonkeyPatch) -> Stems:
    monkeypatch.setattr(acceleration, "_ACCELERATIONS", Registry("accelerations", {}))
    register_acceleration("stems", made := Stems())
    return made


def test_a_registered_acceleration_computes_the_steps(
    tmp_path: Path, stems: Stems, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = run_small(tmp_path / "ours", run__epochs=1).summary
    monkeypatch.undo()
    plain = run_small(tmp_path / "plain", run__epochs=1).summary
    (applied,) = stems.applied
    assert applied.calibrated
    assert applied.calls > 1
    assert "fused stem" in ours["chosen"]["speed"]
    assert ours["weights_sha256"] == plain["weights_sha256"]


def test_what_it_does_not_support_is_left_to_the_next_one(tmp_path: Path, stems: Stems) -> None:
    found = run_small(
        tmp_path / "run", run__epochs=1, model__name="resnet_fast",
        run__accel__recompute_norms=True,
    ).summary  # fmt: skip
    assert stems.applied == []
    assert "norms recomputed" in found["chosen"]["speed"]
