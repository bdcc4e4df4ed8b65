from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.optim import LARS, SGD
from paceline.optim.build import create_optimizer, set_rate
from paceline.optim.settings import OptimSettings


def test_one_step_is_momentum_sgd_with_decay_by_group() -> None:
    weight, bias = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([2.0]))
    groups = [
        {"params": [weight], "weight_decay": 0.5, "role": "weight"},
        {"params": [bias], "weight_decay": 0.0, "role": "bias_norm"},
    ]
    optimizer = create_optimizer(OptimSettings(momentum=0.9), groups, lr=1.0)
    set_rate(optimizer, 0.1)
    for parameter in (weight, bias):
        parameter.grad = torch.tensor([1.0])
    optimizer.step()
    optimizer.step()
    # w: v = 2, w = 1.8; v = 0.9*2 + 1 + 0.9 = 3.7, w = 1.43.  b: v = 1, 1.9; b = 1.9, 1.71
    torch.testing.assert_close(weight.detach(), torch.tensor([1.43]))
    torch.testing.assert_close(bias.detach(), torch.tensor([1.71]))


def two_groups() -> list[dict[str, Any]]:
    return [
        {"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.5, "role": "weight"},
        {"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.0, "role": "bias_norm"},
    ]


@pytest.mark.parametrize(
    ("adapt_bias_norm", "adapts"), [(False, [True, False]), (True, [True] * 2)]
)
def test_lars_leaves_biases_and_normalisation_out_unless_told(
    adapt_bias_norm: bool, adapts: list[bool]
) -> None:
    settings = OptimSettings(
        name="lars",
        momentum=0.8,
        trust_coefficient=0.02,
        eps=1e-8,
        clip=True,
        lr_in_momentum=False,
        adapt_bias_norm=adapt_bias_norm,
    )
    optimizer = create_optimizer(settings, two_groups(), 0.5)
    assert type(optimizer) is LARS
    assert [group["adapt"] for group in optimizer.param_groups] == adapts
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert [group["role"] for group in optimizer.param_groups] == ["weight", "bias_norm"]
    for group in optimizer.param_groups:
        assert group["lr"] == 0.5
        assert group["momentum"] == 0.8
        assert group["trust_coefficient"] == 0.02
        assert group["eps"] == 1e-8
        assert group["clip"] is True
        assert group["lr_in_momentum"] is False


def test_sgd_keeps_the_rate_outside_whatever_the_setting_for_lars() -> None:
    optimizer = create_optimizer(
        OptimSettings(lr_in_momentum=True, nesterov=True), two_groups(), 1.0
    )
    assert type(optimizer) is SGD
    assert not any(group["lr_in_momentum"] or group["adapt"] for group in optimizer.param_groups)
    assert all(group["nesterov"] for group in optimizer.param_groups)


@pytest.mark.parametrize("name", ["sgd", "lars"])
@pytest.mark.parametrize(
    ("chosen", "fused"), [("auto", None), ("triton", True), ("foreach", False)]
)
def test_the_path_and_the_ablation_are_passed_on(
    name: str, chosen: str, fused: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.optim.build.triton_is_usable", lambda device: "")
    assert (
        create_optimizer(OptimSettings(name=name, fused=chosen), two_groups(), 1.0).fused is fused
    )
    ablated = create_optimizer(OptimSettings(name=name, in_half=True), two_groups(), 1.0)
    assert ablated.in_half


def test_settings_and_the_room_itself_start_without_torch() -> None:
    code = (
        "import sys, paceline.optim, paceline.optim.settings as s; s.OptimSettings();"
        "paceline.optim.OptimSettings; assert 'torch' not in sys.modules;"
        "paceline.optim.LARS; assert 'torch' in sys.modules and 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_kernels_that_cannot_run_are_refused_by_the_settings_name() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))], "role": "weight"}]
    with pytest.raises(ConfigError, match="optim.fused = 'triton': on the CPU .* use 'auto'"):
        create_optimizer(OptimSettings(name="lars", fused="triton"), groups, 0.1)
