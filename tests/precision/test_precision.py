"""Policies of number formats, loss scaling, and their settings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.models import SmallResNet
from paceline.precision import (
    LossScale,
    Policy,
    PrecisionSettings,
    allow_tf32,
    choose_policy,
    matrix_weights,
)
from paceline.precision import policy as module
from refusals import refused

CPU = torch.device("cpu")
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
halves = pytest.mark.parametrize("name", HALVES)
FP16, BF16 = (Policy(name, dtype, CPU) for name, dtype in HALVES.items())
YES, NO = torch.tensor(1.0), torch.tensor(0.0)


def chosen(name: str, device: torch.device = CPU) -> Policy:
    return choose_policy(PrecisionSettings(amp_dtype=name), device)


@pytest.mark.parametrize(
    "values",
    [
        {"amp_dtype": "fp61"},
        {"loss_scale_init": 0.5},
        {"loss_scale_init": 2.0**25},
        *({"loss_scale_init": value} for value in (0.0, -2.0, math.inf, math.nan)),
    ],
)
def test_bad_values_name_their_field(values: dict[str, Any]) -> None:
    with refused(f"precision.{next(iter(values))}"):
        PrecisionSettings(**values)


def test_auto_is_fp16_on_a_gpu_and_fp32_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen("auto").name == "fp32"
    monkeypatch.setattr(module, "_problem", lambda dtype, device: "")
    assert chosen("auto", torch.device("cuda")).name == "fp16"
    scales = {name: chosen(name).scales_loss for name in ("fp16", "bf16", "fp32")}
    assert scales == {"fp16": True, "bf16": False, "fp32": False}


@halves
def test_a_format_that_the_device_lacks_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convolution(*_: object) -> Tensor:
        raise RuntimeError(f"'slow_conv2d' not implemented for '{name}'\nsecond line")

    monkeypatch.setattr(module.F, "conv2d", convolution)
    with refused("precision.amp_dtype", "slow_conv2d"):
        chosen(name)
    assert chosen("fp32").dtype == torch.float32  # not probed


@halves
def test_only_matrix_weights_are_rounded(name: str) -> None:
    model = SmallResNet(in_channels=1)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    chosen("fp32").convert(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert chosen(name).convert(model) is model
    assert dict(model.named_parameters()) == parameters, "an optimizer knows them by identity"
    for key, value in model.state_dict().items():
        half = key.endswith("weight") and before[key].dim() > 1
        assert value.dtype == (HALVES[name] if half else before[key].dtype), key
        assert torch.equal(value, before[key].to(value.dtype)), key
        assert value.stride() == before[key].stride(), key


def test_a_shared_weight_stays_shared() -> None:
    first, second, norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
    second.weight = first.weight
    model = nn.Sequential(first, second, norm)
    chosen("bf16").convert(model)
    assert first.weight is second.weight
    assert first.weight.dtype == torch.bfloat16
    assert len(matrix_weights(model)) == 1
    assert {norm.weight.dtype, second.bias.dtype} == {torch.float32}


@halves
def test_computing_in_half_precision(name: str) -> None:
    policy, model = chosen(name), SmallResNet(in_channels=1)
    policy.convert(model)
    with policy.compute():
        out = model(torch.randn(4, 1, 16, 16, dtype=policy.dtype))
    assert out.dtype == policy.dtype
    out.float().sum().backward()
    for key, parameter in model.named_parameters():
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


# --- LossScale ---------------------------------------------------------------------------------


def dynamic(**settings: Any) -> LossScale:
    return LossScale(FP16, PrecisionSettings(**settings))


def after(scale: LossScale, *overflows: Tensor, hold: Tensor = NO) -> list[float]:
    """The scale after each of the steps."""
    values = []
    for overflow in overflows:
        scale.update(overflow, hold)
        values.append(float(scale.value))
    return values


@pytest.mark.parametrize(
    ("first", "interval", "overflows", "expected"),
    [
        (1024.0, 1000, [YES, YES, NO, YES], [512, 256, 256, 128]),
        (8.0, 3, [NO] * 7, [8, 8, 16, 16, 16, 32, 32]),
        (8.0, 3, [NO, NO, YES, NO, NO, NO], [8, 8, 4, 4, 4, 8]),
        (2.0, 1000, [YES] * 3, [1, 1, 1]),
        (2.0**23, 1, [NO] * 2, [2**24, 2**24]),
    ],
)
def test_it_halves_at_an_overflow_and_doubles_after_the_interval(
    first: float, interval: int, overflows: list[Tensor], expected: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(PrecisionSettings, "SCALE_INTERVAL", interval)
    assert after(dynamic(loss_scale_init=first), *overflows) == expected


def test_a_short_step_divides_it_by_a_power_of_two() -> None:
    scale, found = dynamic(loss_scale_init=1024.0), {}
    addresses = [scale.value.data_ptr(), scale.step_value.data_ptr()]
    for samples in (256, 255, 128, 127, 100, 1):
        scale.begin_step(samples, 256)
        found[samples] = 1024.0 / float(scale.step_value)
    assert found == {256: 1, 255: 2, 128: 2, 127: 4, 100: 4, 1: 256}
    assert float(scale.value) == 1024.0
    after(scale, YES)
    scale.begin_step(256, 256)
    assert float(scale.step_value) == 512.0
    scale.restore({"scale": 64.0, "quiet_steps": 2.0})
    # Captured graphs and the optimizer hold the addresses.
    assert addresses == [scale.value.data_ptr(), scale.step_value.data_ptr()]


def test_nothing_changes_while_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrecisionSettings, "SCALE_INTERVAL", 2)
    scale = dynamic(loss_scale_init=8.0)
    after(scale, NO)
    before = scale.state()
    assert after(scale, YES, NO, NO, hold=YES) == [8, 8, 8]
    assert scale.state() == before
    assert after(scale, NO) == [16]


def test_a_restored_scale_continues_within_the_limits_of_this_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PrecisionSettings, "SCALE_INTERVAL", 4)
    scale, other = dynamic(loss_scale_init=256.0), dynamic(loss_scale_init=256.0)
    after(scale, YES, NO, NO)
    other.restore(scale.state())
    assert other.state() == scale.state() == {"scale": 128.0, "quiet_steps": 2.0}
    assert after(other, NO, NO) == after(scale, NO, NO) == [128, 256]
    limited = dynamic()
    limited.restore({"scale": 2.0**30, "quiet_steps": 0.0})
    assert float(limited.value) == 2.0**24


def test_a_run_without_a_scale() -> None:
    none = LossScale(BF16, PrecisionSettings())
    assert after(none, YES) == [1]
    assert not none.dynamic
    assert none.describe() == "none"
    none.restore({"scale": 64.0, "quiet_steps": 3.0})
    assert float(none.value) == 1.0
    # A run in bf16 that is resumed in fp16 starts like a new one.
    scale = dynamic(loss_scale_init=512.0)
    scale.restore(none.state())
    assert scale.state() == {"scale": 512.0, "quiet_steps": 0.0}
    assert scale.describe() == "dynamic, from 512"
