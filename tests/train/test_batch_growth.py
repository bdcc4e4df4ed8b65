"""Batches that grow: which samples each step takes, whole runs, resumes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import CheckpointError, ConfigError
from paceline.core.events import StepEvent
from paceline.data import BatchPlan
from paceline.optim import BatchGrowth, OptimSettings
from paceline.train.resolve import create_schedule
from refusals import refused
from small_runs import losses, run_on_ranks, run_small
from train.runs import EVERY_STEP, stop_after, watched

# 56 samples, 3 epochs: batches of 8 up to sample 56, of 16 up to 112, then of 32.
GROWS: dict[str, Any] = {
    "run__epochs": 3, "run__global_batch_size": None, "run__batch_size": 4,
    "optim__batch_schedule": "0:8,1:16,2:32",
}  # fmt: skip


def reference(samples: int, epochs: int, stages: list[tuple[float, int]]) -> list[tuple[int, int]]:
    """First and last position of each step, by walking through the stream."""
    found, position, total = [], 0, samples * epochs
    while position < total:
        batch = [b for epoch, b in stages if position >= epoch * samples][-1]
        found.append((position, min(position + batch, total)))
        position += batch
    return found


@given(
    samples=st.integers(1, 300),
    epochs=st.integers(1, 6),
    times=st.lists(st.integers(1, 24), unique=True, max_size=4),
    factors=st.lists(st.integers(1, 40), min_size=5, max_size=5),
    world=st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_steps_are_those_of_a_walk_through_the_stream(
    samples: int, epochs: int, times: list[int], factors: list[int], world: int
) -> None:
    micro = 3
    growth = [
        (time / 4, micro * world * f) for time, f in zip(sorted(times), factors, strict=False)
    ]
    first = micro * world * factors[-1]
    plan = BatchPlan(samples, epochs, first, micro, world, tuple(growth))
    steps = reference(samples, epochs, [(0.0, first), *growth])
    assert [plan.step_range(step) for step in range(plan.total_steps)] == steps
    assert plan.epoch_at(plan.total_steps) == epochs
    for step, (start, stop) in enumerate(steps):
        shares = [plan.micro_batches(step, rank) for rank in range(world)]
        taken = np.concatenate([np.arange(*piece) for share in shares for piece in share])
        assert np.array_equal(np.sort(taken), np.arange(start, stop)), "each sample once"
        assert max(np.diff(piece)[0] for share in shares for piece in share) <= micro
        ends = [e for e in range(1, epochs + 1) if start < e * samples <= stop]
        assert plan.ends_epoch(step) == bool(ends)


@pytest.mark.parametrize("mode", ["auto", "constant", "linear", "sqrt"])
def test_the_rate_follows_samples_and_batch(mode: str) -> None:
    """A cosine over the samples seen, times what the mode asks for."""
    optim = OptimSettings(warmup_epochs=0.5, batch_schedule="0:8,1:16,2:64", batch_rate=mode)
    plan = BatchPlan(64, 4, 8, 8, 1, optim.batch_growth.after(8, 8, ()))
    schedule = create_schedule(optim, 0.4, plan)
    power = {"auto": 0.0, "constant": 0.0, "linear": 1.0, "sqrt": 0.5}[mode]
    for step in range(plan.total_steps):
        start, stop = plan.step_range(step)
        epoch = start / 64
        rate = 0.4 * 0.5 * (1 + np.cos(np.pi * max(epoch - 0.5, 0) / 3.5))
        if (start + 8) / 64 < 0.5:
            rate = 0.4 * (stop / 64) / 0.5
        assert schedule.rate(step) == pytest.approx(rate * ((stop - start) / 8) ** power, rel=1e-12)


def test_growth_in_place_of_decay_keeps_the_rate_and_the_limit_hands_over_to_decay() -> None:
    """Smith et al. 2018: batch ×5 where the rate would decay by 0.2, up to a largest batch."""
    optim = OptimSettings.gather(
        schedule="step", epochs=(2.0, 4.0, 6.0), factor=0.2, warmup_epochs=0,
        batch_schedule="x5:200",
    )  # fmt: skip
    stages = optim.batch_growth.after(8, 8, (2.0, 4.0, 6.0))
    assert stages == ((2.0, 40), (4.0, 200))
    plan = BatchPlan(400, 8, 8, 8, 1, stages)
    schedule = create_schedule(optim, 0.1, plan)
    by_epoch = {int(plan.epoch_at(s)): schedule.rate(s) for s in range(plan.total_steps)}
    assert [by_epoch[e] for e in range(6)] == pytest.approx([0.1] * 6)
    assert [by_epoch[e] for e in (6, 7)] == pytest.approx([0.02] * 2), "0.2³ · 25"
    assert plan.total_steps == 2 * 50 + 2 * 10 + 4 * 2


def test_a_run_grows_and_resumes_bit_identically(tmp_path: Path) -> None:
    whole, events = watched(tmp_path / "whole", **GROWS, **EVERY_STEP)
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert [event.batch_size for event in steps] == [8] * 7 + [16] * 4 + [32, 16]
    assert whole.summary["images"] == 3 * 56
    assert whole.summary["steps"] == 13
    for at in (3, 8, 12):
        saved = tmp_path / f"whole/checkpoints/step-{at:08d}.pt"
        rest = run_small(tmp_path / f"rest{at}", run__resume=str(saved), **GROWS).summary
        assert rest["weights_sha256"] == whole.summary["weights_sha256"], at


def test_two_ranks_train_the_same_batches(tmp_path: Path) -> None:
    """Micro-batches stay, so that only the order of sums differs; also after a change of ranks."""
    alone = run_small(tmp_path / "alone", **GROWS)
    first, second = run_on_ranks(2, tmp_path / "two", GROWS)
    assert first["weights_sha256"] == second["weights_sha256"]
    assert losses(tmp_path / "alone") == pytest.approx(losses(tmp_path / "two"), rel=2e-4)
    assert alone.summary["images"] == first["images"]
    stop_after(9, tmp_path / "changed", **GROWS)
    moved = run_on_ranks(2, tmp_path / "changed", GROWS | {"run__resume": "auto"})
    assert moved[0]["images"] == 3 * 56
    assert losses(tmp_path / "changed") == pytest.approx(losses(tmp_path / "alone"), rel=2e-3)


def test_only_later_stages_may_change_on_resume(tmp_path: Path) -> None:
    stop_after(9, tmp_path / "a", **GROWS)
    changed = GROWS | {"optim__batch_schedule": "0:8,1:16,2:64"}
    assert run_small(tmp_path / "a", run__resume="auto", **changed).summary["images"] == 3 * 56
    stop_after(9, tmp_path / "b", **GROWS)
    other = GROWS | {"optim__batch_schedule": "0:8,2:32"}
    with pytest.raises(CheckpointError, match="batch_schedule"):
        run_small(tmp_path / "b", run__resume="auto", **other)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"batch_schedule": "8"}, "optim.batch_schedule"),
        ({"batch_schedule": "0:8,x"}, "optim.batch_schedule"),
        ({"batch_schedule": "1:8,1:16"}, "optim.batch_schedule"),
        ({"batch_schedule": "x1", "schedule": "step"}, "optim.batch_schedule"),
        ({"batch_schedule": "x4", "schedule": "cosine"}, "optim.batch_schedule"),
        (
            {"batch_schedule": "x4", "schedule": "step", "epochs": (1.0, 1.0)},
            "optim.step.epochs",
        ),
        ({"batch_schedule": "x4:0", "schedule": "step"}, "optim.batch_schedule"),
        ({"batch_rate": "cubic"}, "optim.batch_rate"),
    ],
)
def test_refused_settings(values: dict[str, Any], field: str) -> None:
    with refused(field):
        OptimSettings.gather(**values)


def test_refused_sizes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.global_batch_size"):
        BatchGrowth.parse("0:8,1:16").first_batch(16)
    with pytest.raises(ConfigError, match="not a multiple of the micro-batch 16"):
        BatchGrowth.parse("0:16,1:40").after(16, 16, ())
    with refused("optim.batch_schedule"):
        BatchGrowth.parse("x4:40").after(16, 16, (1.0,))
    with pytest.raises(ConfigError, match="not a multiple"):
        run_small(tmp_path / "a", optim__batch_schedule="1:20")
    assert not (tmp_path / "a").exists()
