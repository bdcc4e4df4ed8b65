"""Divergence: when skipped steps mean that a run will not recover, and where it went wrong.

In: a step that was skipped because its gradients were not finite. Out: nothing while there is hope;
else an error, equal on all ranks, that names step and layer. The last good checkpoint stays.
"""

from __future__ import annotations

import math

from paceline.core.errors import RunError
from paceline.train.step import StepOutcome
from paceline.train.training import Training

# A loss that is not finite comes from the forward pass, which no loss scale can mend.
_BAD_LOSSES = 10


def check_divergence(training: Training, outcome: StepOutcome) -> None:
    """All its grounds are numbers that the exchange made equal on all ranks."""
    row, limit = training.progress.skipped_in_a_row, training.config.run.max_skipped_steps
    scale = training.step.scale
    if not math.isfinite(outcome.loss) and row >= min(_BAD_LOSSES, limit):
        cause = f"the loss was not finite in {row} steps in a row"
    elif scale.dynamic and outcome.loss_scale <= scale.floor:
        cause = f"gradients overflow even at the lowest loss scale, {scale.floor:g}"
    elif row >= limit:
        cause = f"gradients were not finite in {row} steps in a row"
    else:
        return
    raise RunError(
        f"diverged at step {outcome.number}: {cause}; {_place(training)}",
        f"lower --lr (now {training.schedule.peak:g} at its peak) or lengthen --warmup-epochs; "
        "the last good checkpoint is kept",
    )


def _place(training: Training) -> str:
    """The layer nearest to the loss whose gradient was not finite: backward met it first."""
    optimizer, names = training.step.update.optimizer, training.step.update.names
    bad = {names[index] for index in optimizer.nonfinite()}
    first = next((name for name in training.step.exchange.names if name in bad), None)
    if first is None:
        return "no gradient tells the layer"
    return f"first in the gradient of {first} ({len(bad)} of {len(names)} tensors)"
