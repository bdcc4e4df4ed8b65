from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.optim import LARS, SGD, Muon
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


def three_roles() -> list[dict[str, Any]]:
    """Stem, linear layer and a weight that is no matrix; then a scale and a matrix of shifts."""
    shapes = [(4, 3, 3, 3), (5, 4), (7,), (4,), (2, 2)]
    ps = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    return [
        {"params": ps[:3], "weight_decay": 0.5, "role": "weight"},
        {"params": ps[3:], "weight_decay": 0.0, "role": "bias_norm"},
    ]


@pytest.mark.parametrize(
    ("orthogonal", "expected"),
    [
        ("filters", [(True, [(4, 3, 3, 3)]), (False, [(5, 4), (7,)])]),
        ("all", [(True, [(4, 3, 3, 3), (5, 4)]), (False, [(7,)])]),
    ],
)
@pytest.mark.parametrize("adapt_bias_norm", [False, True])
def test_muon_takes_filters_or_all_weights_and_no_bias(
    orthogonal: str, expected: list[Any], adapt_bias_norm: bool
) -> None:
    settings = OptimSettings(
        name="muon", momentum=0.75, trust_coefficient=0.04, eps=1e-8, nesterov=True,
        orthogonal=orthogonal, adapt_bias_norm=adapt_bias_norm,
    )  # fmt: skip
    optimizer = create_optimizer(settings, three_roles(), 0.5)
    assert type(optimizer) is Muon
    found = [
        (group["orthogonal"], [tuple(p.shape) for p in group["params"]])
        for group in optimizer.param_groups
    ]
    assert found == [*expected, (False, [(4,), (2, 2)])]
    assert [group["adapt"] for group in optimizer.param_groups] == [True, True, adapt_bias_norm]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.5, 0.0]
    paces = [group["trust_coefficient"] for group in optimizer.param_groups]
    assert paces == pytest.approx([0.16, 0.04, 0.04])
    for group in optimizer.param_groups:
        assert (group["lr"], group["momentum"], group["eps"]) == (0.5, 0.75, 1e-8)
        assert group["nesterov"] is True


def test_muon_leaves_out_a_group_that_would_be_empty() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(4, 3, 3, 3))], "role": "weight"}]
    optimizer = create_optimizer(OptimSettings(name="muon"), groups, 0.1)
    assert [group["orthogonal"] for group in optimizer.param_groups] == [True]


@pytest.mark.parametrize("name", ["sgd", "lars", "muon"])
@pytest.mark.parametrize(
    ("chosen", "fused"), [("auto", None), ("triton", True), ("foreach", False)]
)
def test_the_path_and_the_ablation_are_passed_on(
    name: str, chosen: str, fused: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.optim.build.triton_unavailable", lambda device: "")
    assert (
        create_optimizer(OptimSettings(name=name, fused=chosen), two_groups(), 1.0).fused is fused
    )
    if name != "muon":
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
