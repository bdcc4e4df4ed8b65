"""The learning rate as a pure function of the step.

In: the settings, the batch and the length of the run. Out: `rate(step)`, the rate for the step of
that number, counted from 0 over batches consumed. No state: a resumed run needs nothing but the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.optim.settings import OptimSettings


@dataclass(frozen=True)
class LrSchedule:
    """Linear warm-up from `warmup_start` to `peak`, then the decay that the settings name."""

    settings: OptimSettings
    peak: float
    total_steps: int
    steps_per_epoch: float

    @property
    def warmup_steps(self) -> float:
        wanted = self.settings.warmup_epochs * self.steps_per_epoch
        return self._most_warmup_steps if self._cuts_warmup else wanted

    @property
    def _most_warmup_steps(self) -> float:
        return self.settings.warmup_max_share * self.total_steps

    @property
    def _cuts_warmup(self) -> bool:
        """Whether the share takes a step or more off the epochs; less is rounding."""
        wanted = self.settings.warmup_epochs * self.steps_per_epoch
        return wanted >= self._most_warmup_steps + 1

    def describe_cut(self) -> str:
        """Words for a warm-up that is shorter than `warmup_epochs`; empty where it is not."""
        if not self._cuts_warmup or self.settings.warmup_max_share == 1:
            return ""
        epochs = self.warmup_steps / self.steps_per_epoch
        return (
            f"{epochs:.3g} epochs instead of {self.settings.warmup_epochs:g}: at most "
            f"{self.settings.warmup_max_share:.0%} of a run (--warmup-epochs overrides)"
        )

    def rate(self, step: int) -> float:
        """The rate of `step`. The first step of a warm-up is not zero: it would be wasted."""
        if step + 1 < self.warmup_steps:
            start = self.settings.warmup_start
            return start + (self.peak - start) * (step + 1) / self.warmup_steps
        return self._decayed(step)

    def _decayed(self, step: int) -> float:
        kind, end = self.settings.schedule, self.settings.lr_end
        if kind == "constant":
            return self.peak
        if kind == "step":
            passed = sum(
                step >= epoch * self.steps_per_epoch for epoch in self.settings.decay_epochs
            )
            return self.peak * float(self.settings.decay_rate**passed)
        over = self.settings.decay_over_epochs
        goal = self.total_steps if over is None else over * self.steps_per_epoch
        span = max(goal - self.warmup_steps, 1.0)
        left = 1.0 - min(max(step - self.warmup_steps, 0.0) / span, 1.0)
        if kind == "poly":
            return end + (self.peak - end) * float(left**self.settings.poly_power)
        assert kind == "cosine", kind
        return end + (self.peak - end) * 0.5 * (1.0 + math.cos(math.pi * (1.0 - left)))
