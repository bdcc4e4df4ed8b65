"""The range of global batches in which the rule of `optim.scaling` was tested (docs/optimizers.md).

`paceline.optim.scaling` refuses a batch outside of this range, and `paceline.planner.recommend` does not
recommend such a batch. The range is in `core` because these packages do not import each other.
"""

from __future__ import annotations

# The smallest numbers of steps, in total and per epoch, with which the rule was tested.
LEAST_STEPS, LEAST_STEPS_PER_EPOCH = 90, 2.0


def largest_batch_in_range(samples: int, epochs: float) -> int:
    """Returns the largest global batch for which a run has enough steps per epoch and in total.

    The result is at least 1.

    >>> largest_batch_in_range(50_000, 30) 16666
    """
    in_all, in_epoch = samples * epochs / LEAST_STEPS, samples / LEAST_STEPS_PER_EPOCH
    return max(1, int(min(in_all, in_epoch)))
