from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.order import SampleOrder

GOLDEN_SEED_0 = [8, 0, 1, 5, 3, 2, 7, 9, 6, 4, 3, 0, 9, 1, 5, 6, 4, 7, 8, 2]
GOLDEN_IMAGENET = [1051210, 999488, 1213489, 1181654]


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


def test_a_far_position_needs_no_walk() -> None:
    epochs, indices = SampleOrder(1000, seed=0).at(10**12, 10**12 + 3)
    assert epochs.tolist() == [10**9] * 3
    assert len(set(indices.tolist())) == 3


def test_unshuffled() -> None:
    epochs, indices = SampleOrder(3, seed=0, shuffle=False).at(2, 8)
    assert indices.tolist() == [2, 0, 1, 2, 0, 1]
    assert epochs.tolist() == [0, 1, 1, 1, 2, 2]


def test_threads_share_it() -> None:
    order, wrong = SampleOrder(500, seed=3), []
    want = [SampleOrder(500, seed=3).permutation(e).tolist() for e in range(6)]

    def look(offset: int) -> None:
        for i in range(60):
            epoch = (i + offset) % 6
            if order.permutation(epoch).tolist() != want[epoch]:
                wrong.append(epoch)

    threads = [threading.Thread(target=look, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_only_two_epochs_are_kept() -> None:
    order = SampleOrder(100, seed=0)
    order.at(0, 1000)
    assert len(order._recent) == 2


def test_wrong_requests() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        SampleOrder(0, seed=0)
    with pytest.raises(ValueError, match="no such stretch"):
        SampleOrder(3, seed=0).at(5, 4)
