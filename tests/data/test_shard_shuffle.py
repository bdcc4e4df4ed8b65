from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from paceline.core.errors import ConfigError
from paceline.data.batch_plan import BatchPlan
from paceline.data.loader import TrainLoader
from paceline.data.order import SampleOrder, ShardGroups, shard_groups
from paceline.data.settings import DataSettings
from paceline.data.shard_shuffle import companions_kept, shard_permutation, shuffle_quality
from paceline.data.sources.source import open_source

SIZES = [100] * 200
COUNT = sum(SIZES)
CLASSES = 50
LABELS = np.random.default_rng(0).integers(0, CLASSES, COUNT)


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
    permutation = shard_permutation(seed, epoch, sizes, window, run)
    assert sorted(permutation.tolist()) == list(range(sum(sizes)))


def test_a_function_of_seed_and_epoch() -> None:
    first = shard_permutation(3, 5, SIZES, 8, 16)
    assert np.array_equal(first, shard_permutation(3, 5, SIZES, 8, 16))
    assert not np.array_equal(first, shard_permutation(3, 6, SIZES, 8, 16))
    assert not np.array_equal(first, shard_permutation(4, 5, SIZES, 8, 16))
    # Pinned: resuming a run must find the order that it had.
    assert shard_permutation(1, 0, [5, 4, 6], 2, 2).tolist() == PINNED


PINNED = [2, 3, 6, 7, 0, 1, 5, 8, 4, 9, 10, 13, 14, 11, 12]


def test_a_window_is_done_before_the_next_begins() -> None:
    shard = shard_permutation(3, 0, SIZES, 8, 16) // 100
    for start in range(0, COUNT, 800):
        assert len(set(shard[start : start + 800].tolist())) == 8


def test_seeking_gives_what_walking_gives() -> None:
    order = SampleOrder(COUNT, 9, groups=ShardGroups(tuple(SIZES), 8, 16))
    _, walked = order.at(0, 3 * COUNT)
    for start in (0, 777, COUNT - 3, COUNT, 2 * COUNT + 5):
        fresh = SampleOrder(COUNT, 9, groups=ShardGroups(tuple(SIZES), 8, 16))
        epochs, found = fresh.at(start, start + 10)
        assert np.array_equal(found, walked[start : start + 10])
        assert epochs.tolist() == [p // COUNT for p in range(start, start + 10)]


def test_it_reads_mostly_sequentially_and_still_mixes() -> None:
    shards = shuffle_quality(shard_permutation(3, 0, SIZES, 16, 16), SIZES, LABELS, 256)
    everywhere = shuffle_quality(SampleOrder(COUNT, 3).permutation(0), SIZES, LABELS, 256)
    unmoved = shuffle_quality(np.arange(COUNT), SIZES, LABELS, 256)
    assert unmoved.sequential_share > 0.98
    assert unmoved.displacement == 0
    assert shards.sequential_share > 0.85
    assert everywhere.sequential_share < 0.001
    assert shards.displacement == pytest.approx(1 / 3, abs=0.04)
    assert everywhere.displacement == pytest.approx(1 / 3, abs=0.01)
    # Shards that are class-mixed, as `paceline pack` leaves them, give batches that are as mixed.
    assert shards.label_entropy == pytest.approx(everywhere.label_entropy, abs=0.02)
    assert shards.label_repeats == pytest.approx(1 / CLASSES, abs=0.005)
    assert shards.shards_touched <= 2 * 16 < everywhere.shards_touched


def test_shards_that_are_sorted_by_class_show() -> None:
    permutation = shard_permutation(3, 0, SIZES, 16, 16)
    assert shuffle_quality(permutation, SIZES, np.sort(LABELS), 256).label_entropy < 4.0
    assert shuffle_quality(permutation, SIZES, LABELS, 256).label_entropy > 5.0


def test_runs_stay_together() -> None:
    first, second = (shard_permutation(3, epoch, SIZES, 16, 16) for epoch in (0, 1))
    assert companions_kept(first, second, 256) > 0.7
    order = SampleOrder(COUNT, 3)
    assert companions_kept(order.permutation(0), order.permutation(1), 256) < 0.03


def test_the_setting() -> None:
    assert shard_groups(DataSettings(), [3, 4]) is None
    chosen = DataSettings(shuffle="shards", shuffle_window_shards=3, shuffle_run=5)
    assert shard_groups(chosen, [3, 4]) == ShardGroups((3, 4), 3, 5)
    with pytest.raises(ConfigError, match=r"data.shuffle = 'shards': the data is not in shards"):
        shard_groups(chosen, None)
    with pytest.raises(ValueError, match="groups of 7 samples for 8"):
        SampleOrder(8, 0, groups=ShardGroups((3, 4), 3, 5))


def test_ranks_and_resuming(
    tmp_path: Path,
    write_tar: Callable[..., Path],
    samples: Callable[..., list[tuple[str, bytes]]],
    small_settings: Callable[..., DataSettings],
) -> None:
    """Any number of ranks, and a run that goes on in the middle, see the one stream."""
    for i in range(5):
        write_tar(tmp_path / f"train-{i}.tar", samples(8, first=8 * i, classes=40))
    chosen = small_settings(
        dir=str(tmp_path), shuffle="shards", shuffle_window_shards=2, shuffle_run=3
    )
    source = open_source(chosen, "train")

    def labels(ranks: int, first_step: int = 0) -> list[list[int]]:
        plan = BatchPlan(40, 2, 8, 4, ranks)
        steps: list[list[int]] = [[] for _ in range(first_step, plan.total_steps)]
        for rank in range(ranks):
            with TrainLoader(source, plan, chosen, seed=5, rank=rank, first_step=first_step) as it:
                for step, batch in enumerate(it):
                    steps[step // (2 // ranks)] += batch.labels.tolist()
        return steps

    alone = labels(1)
    for epoch in (alone[:5], alone[5:]):
        assert sorted(label for step in epoch for label in step) == list(range(40))
    assert labels(2) == alone
    assert labels(1, first_step=3) == labels(2, first_step=3) == alone[3:]
    with pytest.raises(ConfigError, match="the data is not in shards"):
        TrainLoader(open_source(small_settings(source="synthetic"), "train"),
                    BatchPlan(1280, 1, 8, 4, 1), chosen, seed=0, rank=0)  # fmt: skip
