from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.models.resnet import SmallResNet
from paceline.precision import policy as module
from paceline.precision.policy import Policy, allow_tf32, choose_policy, matrix_weights
from paceline.precision.settings import PrecisionSettings

CPU = torch.device("cpu")
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def chosen(name: str, device: torch.device = CPU) -> Policy:
    return choose_policy(PrecisionSettings(amp_dtype=name), device)


def test_auto_is_fp16_on_a_gpu_and_fp32_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen("auto").name == "fp32"
    monkeypatch.setattr(module, "_problem", lambda dtype, device: "")
    assert chosen("auto", torch.device("cuda")).name == "fp16"


@pytest.mark.parametrize("name", HALVES)
def test_a_format_that_the_device_lacks_is_refused_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convolution(*_: object) -> torch.Tensor:
        raise RuntimeError(f"'slow_conv2d' not implemented for '{name}'\nsecond line")

    monkeypatch.setattr(module.F, "conv2d", convolution)
    with pytest.raises(ConfigError) as caught:
        chosen(name)
    assert str(caught.value) == (
        f"precision.amp_dtype = {name!r}: cpu cannot compute in it ('slow_conv2d' not implemented "
        f"for '{name}'); use --amp-dtype fp32"
    )
    assert chosen("fp32").dtype == torch.float32  # which is never probed


@pytest.mark.parametrize(("name", "scales"), [("fp16", True), ("bf16", False), ("fp32", False)])
def test_only_fp16_scales_the_loss(name: str, scales: bool) -> None:
    policy = chosen(name)
    assert policy.scales_loss is scales
    assert policy.is_half is (name != "fp32")


@pytest.mark.parametrize("name", HALVES)
def test_only_matrix_weights_are_rounded(name: str) -> None:
    model = SmallResNet(in_channels=1)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    assert chosen(name).convert(model) is model
    assert dict(model.named_parameters()) == parameters, "an optimizer knows them by identity"
    for key, value in model.state_dict().items():
        half = key.endswith("weight") and before[key].dim() > 1
        assert value.dtype == (HALVES[name] if half else before[key].dtype), key
        assert torch.equal(value, before[key].to(value.dtype)), key
        assert value.stride() == before[key].stride(), key
    assert model.layer3[1].conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_fp32_converts_nothing() -> None:
    model = SmallResNet(in_channels=1)
    chosen("fp32").convert(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


class Tied(nn.Module):
    """One weight for two layers, as in autoencoders."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.LayerNorm(4)


def test_a_shared_weight_stays_shared() -> None:
    model = Tied()
    chosen("bf16").convert(model)
    assert model.first.weight is model.second.weight
    assert model.first.weight.dtype == torch.bfloat16
    assert len(matrix_weights(model)) == 1
    assert {model.norm.weight.dtype, model.second.bias.dtype} == {torch.float32}


@pytest.mark.parametrize("name", HALVES)
def test_it_computes_in_its_format(name: str) -> None:
    policy, model = chosen(name), SmallResNet(in_channels=1)
    policy.convert(model)
    with policy.compute():
        out = model(torch.randn(4, 1, 16, 16, dtype=policy.dtype))
    assert out.dtype == policy.dtype
    out.float().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == parameter.dtype, key


def test_tf32_is_switched_for_the_process() -> None:
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    try:
        for wanted in (False, True):
            allow_tf32(PrecisionSettings(tf32=wanted))
            assert [switch.allow_tf32 for switch in switches] == [wanted] * 2
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value
