from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.optim.schedule import LrSchedule
from paceline.optim.settings import SCHEDULES, OptimSettings


def schedule(kind: str, total: int = 100, per_epoch: float = 10.0, **extra: float) -> LrSchedule:
    return LrSchedule(OptimSettings(schedule=kind, **extra), 1.0, total, per_epoch)  # type: ignore[arg-type]


def test_linear_scaling_follows_the_batch_unless_the_rate_is_given() -> None:
    assert OptimSettings(lr_base=0.1).peak_lr(8192) == pytest.approx(3.2)
    assert OptimSettings(lr_base=0.1, lr=0.7).peak_lr(8192) == 0.7


def test_warmup_rises_in_equal_steps_and_wastes_no_step() -> None:
    rates = [schedule("constant", warmup_epochs=1).rate(step) for step in range(12)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10:] == [1.0, 1.0]


def test_warmup_can_start_above_zero() -> None:
    gradual = schedule("constant", warmup_epochs=1, warmup_start=0.5)
    assert gradual.rate(0) == pytest.approx(0.55)
    assert gradual.rate(9) == 1.0


def test_goyal_steps_decay_at_their_epochs() -> None:
    settings = OptimSettings(schedule="step", warmup_epochs=5)
    goyal = LrSchedule(settings, 3.2, 90 * 156, 156.0)
    assert goyal.rate(30 * 156 - 1) == pytest.approx(3.2)
    assert goyal.rate(30 * 156) == pytest.approx(0.32)
    assert goyal.rate(60 * 156) == pytest.approx(0.032)
    assert goyal.rate(80 * 156) == pytest.approx(0.0032)


def test_polynomial_of_power_two() -> None:
    poly = schedule("poly", warmup_epochs=0, poly_power=2)
    assert poly.rate(0) == 1.0
    assert poly.rate(50) == pytest.approx(0.25)
    assert poly.rate(90) == pytest.approx(0.01)


def test_the_decay_may_arrive_after_the_end_of_the_run() -> None:
    # 10 epochs of 10 steps, but the way down is 19 epochs long after 1 of warm-up.
    poly = schedule("poly", warmup_epochs=1, decay_over_epochs=20)
    assert poly.rate(9) == poly.rate(10) == 1.0
    assert poly.rate(99) == pytest.approx((1 - 89 / 190) ** 2)
    assert schedule("cosine", warmup_epochs=0, decay_over_epochs=20).rate(100) == pytest.approx(0.5)


def test_the_decay_may_arrive_before_the_end_of_the_run() -> None:
    early = schedule("poly", warmup_epochs=0, decay_over_epochs=5, lr_end=0.1)
    assert early.rate(25) == pytest.approx(0.1 + 0.9 * 0.25)
    assert [early.rate(step) for step in (50, 99)] == [0.1, 0.1]


def test_cosine_halves_in_the_middle() -> None:
    cosine = schedule("cosine", warmup_epochs=0, lr_end=0.2)
    assert cosine.rate(50) == pytest.approx(0.6)
    assert cosine.rate(100) == pytest.approx(0.2)


@given(
    kind=st.sampled_from(SCHEDULES),
    total=st.integers(1, 500),
    per_epoch=st.floats(0.01, 50),
    warmup=st.floats(0, 20),
)
def test_every_rate_is_finite_and_never_above_the_peak(
    kind: str, total: int, per_epoch: float, warmup: float
) -> None:
    rates = [
        schedule(kind, total, per_epoch, warmup_epochs=warmup).rate(step) for step in range(total)
    ]
    assert all(math.isfinite(rate) and 0 <= rate <= 1.0 + 1e-12 for rate in rates)
    assert max(rates) > 0


def test_warmup_takes_at_most_its_share_of_the_run() -> None:
    # 2 epochs of 10 steps with 3 of warm-up.
    cut = schedule("cosine", 20, warmup_epochs=3, warmup_max_share=0.2)
    assert cut.warmup_steps == 4
    assert [cut.rate(step) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert cut.rate(19) < 0.05
    assert "0.4 epochs instead of 3" in cut.describe_cut()
    asked = schedule("cosine", 20, warmup_epochs=3)
    assert asked.warmup_steps == 20
    assert asked.describe_cut() == ""
    exact = schedule("cosine", 150, warmup_epochs=3, warmup_max_share=0.2)
    assert exact.warmup_steps == 30
    assert exact.describe_cut() == ""
