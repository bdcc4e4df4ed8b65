from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from data.small import samples, small_settings, train_loader, write_tar
from paceline.core.errors import ConfigError
from paceline.data import BatchPlan, DataSettings, SampleOrder, open_source
from paceline.data.order import (
    ShardGroups,
    shard_groups,
    shard_permutation,
    uniform,
)

GOLDEN_SEED_0 = [8, 0, 1, 5, 3, 2, 7, 9, 6, 4, 3, 0, 9, 1, 5, 6, 4, 7, 8, 2]
GOLDEN_IMAGENET = [1051210, 999488, 1213489, 1181654]
SIZES = [100] * 200
GROUPS = ShardGroups(tuple(SIZES), 8, 16)
COUNT = sum(SIZES)
PINNED = [2, 3, 6, 7, 0, 1, 5, 8, 4, 9, 10, 13, 14, 11, 12]
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def test_order_is_pinned() -> None:
    """A change of these numbers breaks the resumption of every run: it needs a new major version."""
    epochs, indices = SampleOrder(10, seed=0).at(0, 20)
    assert epochs.tolist() == [0] * 10 + [1] * 10
    assert indices.tolist() == GOLDEN_SEED_0
    start = 3 * 1_281_167 + 1000
    epochs, indices = SampleOrder(1_281_167, seed=42).at(start, start + 4)
    assert epochs.tolist() == [3] * 4
    assert indices.tolist() == GOLDEN_IMAGENET


@given(count=st.integers(1, 200), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000))
def test_each_sample_exactly_once_an_epoch(count: int, seed: int, epoch: int) -> None:
    epochs, indices = SampleOrder(count, seed).at(epoch * count, (epoch + 1) * count)
    assert set(epochs.tolist()) == {epoch}
    assert sorted(indices.tolist()) == list(range(count))


@given(
    count=st.integers(1, 50),
    start=st.integers(0, 500),
    length=st.integers(0, 300),
    cuts=st.lists(st.integers(0, 300), max_size=5),
)
def test_any_stretch_is_the_same_however_it_is_cut(
    count: int, start: int, length: int, cuts: list[int]
) -> None:
    order = SampleOrder(count, seed=7)
    whole = order.at(0, start + length)
    edges = sorted({start, start + length, *(start + min(c, length) for c in cuts)})
    pieces = [SampleOrder(count, seed=7).at(a, b) for a, b in itertools.pairwise(edges)]
    for part in (0, 1):
        joined = [value for piece in pieces for value in piece[part].tolist()]
        assert joined == whole[part][start:].tolist()


def test_epochs_and_seeds_differ() -> None:
    order = SampleOrder(1000, seed=0)
    first, second = order.permutation(0), order.permutation(1)
    other = SampleOrder(1000, seed=1).permutation(0)
    # A random permutation keeps about one sample in its place.
    assert (first == np.arange(1000)).sum() < 10
    assert (first == second).sum() < 10
    assert (first == other).sum() < 10


# --- shuffling by shards ---------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30),
    st.integers(0, 2**40),
    st.integers(0, 5),
    st.integers(1, 12),
    st.integers(1, 50),
)
def test_every_sample_exactly_once(
    sizes: list[int], seed: int, epoch: int, window: int, run: int
) -> None:
    permutation = shard_permutation(seed, epoch, ShardGroups(tuple(sizes), window, run))
    assert sorted(permutation.tolist()) == list(range(sum(sizes)))


def test_a_function_of_seed_and_epoch() -> None:
    first = shard_permutation(3, 5, GROUPS)
    assert np.array_equal(first, shard_permutation(3, 5, GROUPS))
    assert not np.array_equal(first, shard_permutation(3, 6, GROUPS))
    assert not np.array_equal(first, shard_permutation(4, 5, GROUPS))
    # Pinned: resuming a run must find the order that it had.
    assert shard_permutation(1, 0, ShardGroups((5, 4, 6), 2, 2)).tolist() == PINNED


def test_a_window_is_done_before_the_next_begins() -> None:
    shard = shard_permutation(3, 0, GROUPS) // 100
    for start in range(0, COUNT, 800):
        assert len(set(shard[start : start + 800].tolist())) == 8


def test_seeking_gives_what_walking_gives() -> None:
    order = SampleOrder(COUNT, 9, groups=GROUPS)
    _, walked = order.at(0, 3 * COUNT)
    for start in (0, 777, COUNT - 3, COUNT, 2 * COUNT + 5):
        fresh = SampleOrder(COUNT, 9, groups=GROUPS)
        epochs, found = fresh.at(start, start + 10)
        assert np.array_equal(found, walked[start : start + 10])
        assert epochs.tolist() == [p // COUNT for p in range(start, start + 10)]


def test_the_setting() -> None:
    assert shard_groups(DataSettings(), [3, 4]) is None
    chosen = DataSettings(shuffle="shards")
    assert shard_groups(chosen, [3, 4]) == ShardGroups((3, 4), 16, 16)
    with pytest.raises(ConfigError, match=r"data.shuffle = 'shards': the data is not in shards"):
        shard_groups(chosen, None)


def test_ranks_and_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is the same for any number of ranks and after a resume."""
    for i in range(5):
        write_tar(tmp_path / f"train-{i}.tar", samples(8, first=8 * i, classes=40))
    monkeypatch.setattr("paceline.data.order.SHUFFLE_RUN", 3)
    chosen = small_settings(dir=str(tmp_path), shuffle="shards:2")
    source = open_source(chosen, "train")

    def labels(ranks: int, first_step: int = 0) -> list[list[int]]:
        plan = BatchPlan(40, 2, 8, 4, ranks)
        steps: list[list[int]] = [[] for _ in range(first_step, plan.total_steps)]
        for rank in range(ranks):
            with train_loader(source, plan, chosen, seed=5, rank=rank, first_step=first_step) as it:
                for step, batch in enumerate(it):
                    steps[step // (2 // ranks)] += batch.labels.tolist()
        return steps

    alone = labels(1)
    for epoch in (alone[:5], alone[5:]):
        assert sorted(label for step in epoch for label in step) == list(range(40))
    assert labels(2) == alone
    assert labels(1, first_step=3) == labels(2, first_step=3) == alone[3:]
    with pytest.raises(ConfigError, match="the data is not in shards"):
        train_loader(
            open_source(small_settings(source="synthetic"), "train"),
            BatchPlan(1280, 1, 8, 4, 1),
            chosen,
            seed=0,
        )


# --- the plan of steps -----------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    micro, world = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    return BatchPlan(
        samples=draw(st.integers(1, 60)),
        epochs=draw(st.integers(1, 4)),
        global_batch=micro * draw(st.integers(1, 12)),
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


def test_a_batch_larger_than_the_data_set() -> None:
    plan = BatchPlan(samples=5, epochs=6, global_batch=16, micro_batch=4, world_size=2)
    assert plan.total_steps == 2
    assert plan.step_range(1) == (16, 30)
    assert [plan.epoch_at(step) for step in range(3)] == [0, 3.2, 6]
    assert plan.ends_epoch(0)
    assert plan.ends_epoch(1)


@given(plans())
def test_one_end_at_least_an_epoch_and_always_the_last(plan: BatchPlan) -> None:
    ends = [step for step in range(plan.total_steps) if plan.ends_epoch(step)]
    assert ends[-1] == plan.total_steps - 1
    completed = {int(plan.epoch_at(step + 1)) for step in ends}
    assert len(completed) == len(ends)


def test_indivisible_batch() -> None:
    with pytest.raises(ValueError, match=r"global_batch = 10 is not a multiple"):
        BatchPlan(samples=4, epochs=1, global_batch=10, micro_batch=4, world_size=2)


def test_steps_and_ranks_that_do_not_exist() -> None:
    plan = BatchPlan(samples=4, epochs=1, global_batch=4, micro_batch=2, world_size=2)
    with pytest.raises(IndexError, match="step 1 is out of range: there are 1 steps"):
        plan.step_range(1)
    with pytest.raises(IndexError, match="rank 2 is out of range: there are 2 ranks"):
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


# --- random numbers --------------------------------------------------------------------------------


def test_uniform_is_pinned() -> None:
    row = uniform(3, np.array([2]), np.array([11]), 3)[0]
    assert row.tolist() == [0.211709054269003, 0.8594363021777001, 0.7385819474094855]


def test_uniform_is_even_and_uncorrelated() -> None:
    numbers = uniform(0, np.zeros(20_000, dtype=np.int64), np.arange(20_000), 3)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert abs(counts / 3000 - 1).max() < 0.08
    assert abs(np.corrcoef(numbers.T) - np.eye(3)).max() < 0.03
    assert abs(np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]) < 0.03
