"""The range of global batches in which the large-batch rule has been tried (docs/large-batch.md#range).

`paceline.optim.scaling` refuses a batch outside of it, `paceline.planner.recommend` recommends none. The
two packages do not import each other, so the range is here.
"""

from __future__ import annotations

# Fewer steps have not been measured.
LEAST_STEPS, LEAST_STEPS_PER_EPOCH = 90, 2.0


def largest_batch_in_range(samples: int, epochs: float) -> int:
    """The largest global batch with enough steps in an epoch and in all; at least 1.

    >>> largest_batch_in_range(50_000, 30)
    16666
    """
    in_all, in_epoch = samples * epochs / LEAST_STEPS, samples / LEAST_STEPS_PER_EPOCH
    return max(1, int(min(in_all, in_epoch)))
