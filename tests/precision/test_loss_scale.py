from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.precision.policy import LossScale, Policy
from paceline.precision.settings import PrecisionSettings

CPU = torch.device("cpu")
FP16 = Policy("fp16", torch.float16, CPU)
BF16 = Policy("bf16", torch.bfloat16, CPU)
YES, NO = torch.tensor(1.0), torch.tensor(0.0)


def dynamic(**settings: Any) -> LossScale:
    return LossScale(FP16, PrecisionSettings(**settings))


def after(scale: LossScale, *overflows: Tensor, hold: Tensor = NO) -> list[float]:
    """The scale after each of the steps."""
    values = []
    for overflow in overflows:
        scale.update(overflow, hold)
        values.append(float(scale.value))
    return values


def test_it_halves_at_every_overflow() -> None:
    assert after(dynamic(loss_scale_init=1024.0), YES, YES, NO, YES) == [512, 256, 256, 128]


def test_it_doubles_after_the_interval_and_counts_anew() -> None:
    scale = dynamic(loss_scale_init=8.0, loss_scale_interval=3)
    assert after(scale, *[NO] * 7) == [8, 8, 16, 16, 16, 32, 32]


def test_an_overflow_starts_the_count_anew() -> None:
    scale = dynamic(loss_scale_init=8.0, loss_scale_interval=3)
    assert after(scale, NO, NO, YES, NO, NO, NO) == [8, 8, 4, 4, 4, 8]


def test_it_stays_between_floor_and_ceiling() -> None:
    limits = {"loss_scale_min": 4.0, "loss_scale_max": 16.0}
    falling = dynamic(loss_scale_init=8.0, **limits)
    assert after(falling, YES, YES, YES) == [4, 4, 4]
    rising = dynamic(loss_scale_init=8.0, loss_scale_interval=1, **limits)
    assert after(rising, NO, NO, NO) == [16, 16, 16]


def test_a_short_step_divides_it_by_a_power_of_two() -> None:
    scale = dynamic(loss_scale_init=1024.0)
    address = scale.step_value.data_ptr()
    found = {}
    for samples in (256, 255, 128, 127, 100, 1):
        scale.begin_step(samples, 256)
        found[samples] = 1024.0 / float(scale.step_value)
    assert found == {256: 1, 255: 2, 128: 2, 127: 4, 100: 4, 1: 256}
    assert float(scale.value) == 1024.0
    assert scale.step_value.data_ptr() == address
    after(scale, YES)
    scale.begin_step(256, 256)
    assert float(scale.step_value) == 512.0


def test_nothing_moves_while_held() -> None:
    scale = dynamic(loss_scale_init=8.0, loss_scale_interval=2)
    after(scale, NO)
    before = scale.state()
    assert after(scale, YES, NO, NO, hold=YES) == [8, 8, 8]
    assert scale.state() == before
    assert after(scale, NO) == [16]


def test_the_memory_of_the_scale_stays() -> None:
    """A captured graph and the optimizer know the address."""
    scale = dynamic()
    address = scale.value.data_ptr()
    after(scale, YES)
    scale.restore({"scale": 64.0, "quiet_steps": 2.0})
    assert scale.value.data_ptr() == address


def test_a_restored_scale_goes_on_where_it_was() -> None:
    settings = {"loss_scale_init": 256.0, "loss_scale_interval": 4}
    scale, other = dynamic(**settings), dynamic(**settings)
    after(scale, YES, NO, NO)
    other.restore(scale.state())
    assert other.state() == scale.state() == {"scale": 128.0, "quiet_steps": 2.0}
    assert after(other, NO, NO) == after(scale, NO, NO) == [128, 256]


def test_a_restored_scale_keeps_to_this_runs_limits() -> None:
    scale = dynamic(loss_scale_max=1024.0, loss_scale_init=1024.0)
    scale.restore({"scale": 65536.0, "quiet_steps": 0.0})
    assert float(scale.value) == 1024.0


@pytest.mark.parametrize("policy", [FP16, BF16], ids=lambda policy: policy.name)
def test_a_constant_scale_never_moves(policy: Policy) -> None:
    scale = LossScale(policy, PrecisionSettings(loss_scale=128.0, loss_scale_interval=1))
    assert after(scale, YES, NO, NO) == [128, 128, 128]
    assert not scale.dynamic
    assert scale.describe() == "constant 128"
    scale.restore({"scale": 64.0, "quiet_steps": 3.0})
    assert float(scale.value) == 128.0


def test_formats_with_exponents_enough_have_none() -> None:
    scale = LossScale(BF16, PrecisionSettings())
    assert after(scale, YES) == [1]
    assert scale.describe() == "none"


def test_a_constant_scale_has_nothing_to_give_to_a_dynamic_one() -> None:
    """A run in bf16 that goes on in fp16 starts like a new one."""
    scale = dynamic(loss_scale_init=512.0)
    scale.restore(LossScale(BF16, PrecisionSettings()).state())
    assert scale.state() == {"scale": 512.0, "quiet_steps": 0.0}
    assert scale.describe() == "dynamic, from 512"
