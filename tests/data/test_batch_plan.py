from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.batch_plan import BatchPlan
from paceline.data.order import SampleOrder


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    micro, world = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    return BatchPlan(
        samples=draw(st.integers(1, 60)),
        epochs=draw(st.integers(1, 4)),
        global_batch=micro * world * draw(st.integers(1, 4)),
        micro_batch=micro,
        world_size=world,
    )


@given(plans())
def test_every_sample_once_an_epoch_over_all_ranks(plan: BatchPlan) -> None:
    order = SampleOrder(plan.samples, seed=1)
    seen: Counter[tuple[int, int]] = Counter()
    for rank in range(plan.world_size):
        for step in range(plan.total_steps):
            for start, stop in plan.micro_batches(step, rank):
                epochs, indices = order.at(start, stop)
                seen.update(zip(epochs.tolist(), indices.tolist(), strict=True))
    assert set(seen.values()) == {1}
    assert len(seen) == plan.samples * plan.epochs
    assert {epoch for epoch, _ in seen} == set(range(plan.epochs))


@given(plans())
def test_steps_are_full_but_the_last(plan: BatchPlan) -> None:
    ranges = [plan.step_range(step) for step in range(plan.total_steps)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == plan.total_samples
    assert all(stop - start == plan.global_batch for start, stop in ranges[:-1])
    assert 0 < ranges[-1][1] - ranges[-1][0] <= plan.global_batch
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


@given(plans())
def test_micro_batches_are_the_same_for_any_number_of_ranks(plan: BatchPlan) -> None:
    alone = BatchPlan(plan.samples, plan.epochs, plan.global_batch, plan.micro_batch, 1)
    for step in range(plan.total_steps):
        shared = [plan.micro_batches(step, rank) for rank in range(plan.world_size)]
        assert sorted(piece for share in shared for piece in share) == alone.micro_batches(step, 0)
        for j, piece in enumerate(alone.micro_batches(step, 0)):
            assert piece in shared[j % plan.world_size]


@given(plans())
def test_sizes_within_a_step_differ_by_at_most_one(plan: BatchPlan) -> None:
    for step in range(plan.total_steps):
        pieces = [p for rank in range(plan.world_size) for p in plan.micro_batches(step, rank)]
        sizes = {stop - start for start, stop in pieces}
        assert max(sizes) <= plan.micro_batch
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        if step < plan.total_steps - 1:
            assert sizes == {plan.micro_batch}
            assert len(plan.micro_batches(step, 0)) == plan.accumulation


def test_short_last_step_by_hand() -> None:
    plan = BatchPlan(samples=10, epochs=1, global_batch=8, micro_batch=2, world_size=2)
    assert plan.total_steps == 2
    assert plan.micro_batches(0, 0) == [(0, 2), (4, 6)]
    assert plan.micro_batches(0, 1) == [(2, 4), (6, 8)]
    assert plan.micro_batches(1, 0) == [(8, 10)]
    assert plan.micro_batches(1, 1) == []


def test_nearly_equal_cuts_by_hand() -> None:
    plan = BatchPlan(samples=7, epochs=1, global_batch=12, micro_batch=3, world_size=1)
    assert plan.micro_batches(0, 0) == [(0, 2), (2, 4), (4, 7)]


def test_a_batch_larger_than_the_data_set() -> None:
    plan = BatchPlan(samples=5, epochs=6, global_batch=16, micro_batch=4, world_size=2)
    assert plan.total_steps == 2
    assert plan.step_range(1) == (16, 30)
    assert [plan.epoch_at(step) for step in range(3)] == [0, 3.2, 6]
    assert plan.ends_epoch(0)
    assert plan.ends_epoch(1)


def test_ends_of_epochs() -> None:
    plan = BatchPlan(samples=10, epochs=3, global_batch=4, micro_batch=4, world_size=1)
    # Consumed after each step: 4 8 12 16 20 24 28 30.
    assert [plan.ends_epoch(s) for s in range(plan.total_steps)] == [
        False, False, True, False, True, False, False, True,
    ]  # fmt: skip


@given(plans())
def test_one_end_at_least_an_epoch_and_always_the_last(plan: BatchPlan) -> None:
    ends = [step for step in range(plan.total_steps) if plan.ends_epoch(step)]
    assert ends[-1] == plan.total_steps - 1
    completed = {int(plan.epoch_at(step + 1)) for step in ends}
    assert len(completed) == len(ends)


@pytest.mark.parametrize(
    "field", ["samples", "epochs", "global_batch", "micro_batch", "world_size"]
)
def test_nothing_may_be_zero(field: str) -> None:
    values = {"samples": 4, "epochs": 1, "global_batch": 4, "micro_batch": 2, "world_size": 2}
    with pytest.raises(ValueError, match=f"{field} = 0"):
        BatchPlan(**{**values, field: 0})


def test_indivisible_batch() -> None:
    with pytest.raises(ValueError, match=r"global_batch = 10 is not a multiple"):
        BatchPlan(samples=4, epochs=1, global_batch=10, micro_batch=2, world_size=2)


def test_steps_and_ranks_that_do_not_exist() -> None:
    plan = BatchPlan(samples=4, epochs=1, global_batch=4, micro_batch=2, world_size=2)
    with pytest.raises(IndexError, match="step 1 of 1"):
        plan.step_range(1)
    with pytest.raises(IndexError, match="rank 2 of 2"):
        plan.micro_batches(0, 2)


def test_every_so_many_epochs() -> None:
    """Ten samples an epoch, a step of 4: epochs end in steps 2, 4, 7 and 9."""
    plan = BatchPlan(samples=10, epochs=4, global_batch=4, micro_batch=4, world_size=1)
    steps = range(plan.total_steps)
    assert [s for s in steps if plan.ends_epoch(s)] == [2, 4, 7, 9]
    assert [s for s in steps if plan.ends_epoch(s, 2)] == [4, 9]
    assert [s for s in steps if plan.ends_epoch(s, 3)] == [7]
    several = BatchPlan(samples=2, epochs=8, global_batch=6, micro_batch=6, world_size=1)
    assert [s for s in range(several.total_steps) if several.ends_epoch(s, 4)] == [1, 2]
