from __future__ import annotations

import numpy as np
import pytest

from paceline.data.randomness import AUGMENT_STREAM, ORDER_STREAM, hash64, to_unit, uniform

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def finalise(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def reference(seed: int, *counters: int) -> int:
    """The same hash in Python's own integers."""
    state = finalise((seed + GOLDEN) & MASK)
    for counter in counters:
        state = finalise((state + (counter + 1) * GOLDEN) & MASK)
    return state


def test_finaliser_is_splitmix64() -> None:
    # The first outputs of the published generator from seed 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [finalise((1234567 + (i + 1) * GOLDEN) & MASK) for i in range(3)] == expected


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 + 5])
def test_hash_equals_the_reference(seed: int) -> None:
    epochs = np.array([0, 1, 7, 2**40])
    indices = np.array([0, 5, 1_281_166, 2**50])
    got = hash64(seed, ORDER_STREAM, epochs, indices)
    want = [
        reference(seed, ORDER_STREAM, int(e), int(i)) for e, i in zip(epochs, indices, strict=True)
    ]
    assert got.dtype == np.uint64
    assert got.tolist() == want


def test_uniform_is_pinned() -> None:
    row = uniform(3, np.array([2]), np.array([11]), 3)[0]
    want = [(reference(3, AUGMENT_STREAM, 2, 11, d) >> 11) / 2**53 for d in range(3)]
    assert row.tolist() == want


def test_a_sample_draws_the_same_in_any_company() -> None:
    epochs, indices = np.array([0, 0, 1, 4]), np.array([9, 2, 9, 0])
    together = uniform(5, epochs, indices, 6)
    for i in range(4):
        alone = uniform(5, epochs[i : i + 1], indices[i : i + 1], 6)
        np.testing.assert_array_equal(together[i], alone[0])
    np.testing.assert_array_equal(together[:, :2], uniform(5, epochs, indices, 2))
    assert len(np.unique(together)) == together.size


def test_uniform_is_even_and_uncorrelated() -> None:
    numbers = uniform(0, np.zeros(20_000, dtype=np.int64), np.arange(20_000), 3)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert abs(counts / 3000 - 1).max() < 0.08
    assert abs(np.corrcoef(numbers.T) - np.eye(3)).max() < 0.03
    assert abs(np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1]) < 0.03


def test_unit_interval_is_half_open() -> None:
    ends = to_unit(np.array([0, MASK], dtype=np.uint64))
    assert ends[0] == 0
    assert ends[1] < 1
