"""Counter-based random numbers: what a position draws is a function of its counters alone.

In: a seed and counters (epoch, sample index, draw). Out: 64-bit hashes or uniform numbers, the same
on every machine, in every thread, for every NumPy. No state, so there is nothing to save or to
share.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]
Int64 = npt.NDArray[np.int64]

# The constants of splitmix64 (Steele, Lea and Flood 2014): the golden ratio as the step between
# counters, and the multipliers of its finaliser.
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1

# Uses that share a seed must not share numbers: each hashes its own constant first.
ORDER_STREAM = 1
AUGMENT_STREAM = 2
SYNTHETIC_STREAM = 3
PACK_STREAM = 4
SHARD_ORDER_STREAM = 5
RUN_ORDER_STREAM = 6


def hash64(seed: int, stream: int, *counters: npt.ArrayLike) -> UInt64:
    """Hashes `(seed, stream, counters…)`; counters broadcast against one another.

    For fixed values of all others the map from the last counter is one to one, so hashes of
    different indices never tie.
    """
    state = _mix(np.array([(seed + _GOLDEN) & _MASK], dtype=np.uint64))
    for counter in (stream, *counters):
        # Arrays wrap silently where NumPy's scalars would warn, hence at least one dimension.
        step = np.atleast_1d(np.asarray(counter)).astype(np.uint64) + np.uint64(1)
        state = _mix(state + step * np.uint64(_GOLDEN))
    return state


def uniform(seed: int, epochs: Int64, indices: Int64, draws: int) -> npt.NDArray[np.float64]:
    """`draws` numbers in [0, 1) for each sample, a row a sample: (seed, epoch, index) decides."""
    numbers = hash64(
        seed, AUGMENT_STREAM, epochs[:, None], indices[:, None], np.arange(draws)[None, :]
    )
    return to_unit(numbers)


def to_unit(hashes: UInt64) -> npt.NDArray[np.float64]:
    """The upper 53 bits as a number in [0, 1): every value is exact in float64."""
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: UInt64) -> UInt64:
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))
