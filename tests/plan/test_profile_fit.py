from __future__ import annotations

import pytest

from paceline.core.errors import ConfigError
from paceline.plan.profile_fit import StepAnatomy, fit_workload

ANATOMY = StepAnatomy(0.010, 0.020, 0.001, (("b", 5, True, 0.008), ("a", 7, False, 0.021)))


def test_a_line_through_the_steps() -> None:
    steps = [(batch, 0.004 + 0.001 + 1e-4 * batch) for batch in (64, 256, 512)]
    work = fit_workload("made", steps, ANATOMY, "here")
    assert work.compute_s(128) == pytest.approx(0.005 + 0.0128)
    assert work.update_s == 0.001
    assert work.forward.at(100) * 2 == pytest.approx(work.backward.at(100))
    assert work.forward.fixed_s + work.backward.fixed_s == pytest.approx(0.004)
    assert [(g.name, g.half) for g in work.gradients] == [("b", True), ("a", False)]
    # The last may be seen a little after the pass has ended.
    assert [g.ready for g in work.gradients] == pytest.approx([0.4, 1.0])
    assert work.spread == pytest.approx(0.02)


def test_one_batch_goes_through_the_origin() -> None:
    work = fit_workload("made", [(10, 0.101)], ANATOMY, "here")
    assert work.compute_s(20) == pytest.approx(0.001 + 0.2)
    assert work.spread == 0.1


def test_a_line_never_falls_below_nothing() -> None:
    work = fit_workload("made", [(10, 0.011), (20, 0.041)], ANATOMY, "here")
    assert work.forward.fixed_s == 0
    assert work.spread > 0.2


def test_larger_batches_must_be_slower() -> None:
    with pytest.raises(ConfigError, match="quiet machine"):
        fit_workload("made", [(10, 0.2), (20, 0.1)], ANATOMY, "here")
