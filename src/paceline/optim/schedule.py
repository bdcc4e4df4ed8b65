"""The learning rate as a pure function of the step: a resumed run needs no schedule state."""

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
        """Whether `warmup_max_share` shortens the warm-up by at least one step."""
        wanted = self.settings.warmup_epochs * self.steps_per_epoch
        return wanted >= self._most_warmup_steps + 1

    def describe_cut(self) -> str:
        """Describes a warm-up shorter than `warmup_epochs`; otherwise empty."""
        if not self._cuts_warmup or self.settings.warmup_max_share == 1:
            return ""
        epochs = self.warmup_steps / self.steps_per_epoch
        return (
            f"{epochs:.3g} epochs instead of {self.settings.warmup_epochs:g}: at most "
            f"{self.settings.warmup_max_share:.0%} of a run (--warmup-epochs overrides)"
        )

    def rate(self, step: int) -> float:
        """The rate of `step`, counted from 0. The first warm-up step is not 0, which would waste it."""
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
