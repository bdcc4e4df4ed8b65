"""Learning rate, momentum and other values of a schedule, as pure functions of the step: a resumed run
needs no state of a schedule.

Times are counted in steps of the first batch, so that a schedule does not depend on how the batch grows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from paceline.optim.registry import Course, OptimizerSettings, ScheduleSettings
from paceline.optim.settings import OptimSettings


def set_rate(
    optimizer: torch.optim.Optimizer, rate: float, others: Mapping[str, float] | None = None
) -> None:
    """Sets the rate of all groups, times their `lr_scale`, and the values that a schedule changes with
    it; the momentum of AdamW and LAMB is their β₁."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
        for name, value in (others or {}).items():
            if name == "momentum" and "betas" in group:
                group["betas"] = (value, group["betas"][1])
            else:
                group[name] = value


@dataclass(frozen=True)
class LrSchedule:
    """Linear warm-up from `warmup_start` to `peak`, then the schedule that the settings name; or that
    schedule alone, if it rises by itself.

    `total_steps` and `steps_per_epoch` are those of the first batch. Where the batch grows, `position`
    gives the number of samples before a step.
    """

    settings: OptimSettings
    peak: float
    total_steps: float
    steps_per_epoch: float
    position: Callable[[int], int] | None = None
    _own: tuple[ScheduleSettings, OptimizerSettings] = field(init=False, repr=False, compare=False)

    def time(self, step: int) -> float:
        """When `step` begins, in steps of the first batch."""
        if self.position is None:
            return step
        return self.position(step) / self.position(1)

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

    def __post_init__(self) -> None:
        own = (self.settings.own_schedule, self.settings.own_optimizer)
        object.__setattr__(self, "_own", own)

    @cached_property
    def course(self) -> Course:
        """The run as the schedule sees it."""
        over = self.settings.decay_over_epochs
        end = self.total_steps if over is None else over * self.steps_per_epoch
        return Course(
            self.peak, self.settings.lr_end, self.total_steps, self.steps_per_epoch,
            self.warmup_steps, end,
        )  # fmt: skip

    def describe_cut(self) -> str:
        """Describes a warm-up shorter than `warmup_epochs`, or none; otherwise empty."""
        wanted = self.settings.warmup_epochs
        if not self.settings.own_schedule.WARMS_UP:
            if not wanted:
                return ""
            return (
                f"none: {self.settings.schedule} rises by itself, optim.warmup_epochs = {wanted:g} "
                "is not used"
            )
        if self.settings.warmup_max_share == 1 or not self._cuts_warmup:
            return ""
        epochs = self.warmup_steps / self.steps_per_epoch
        return (
            f"{epochs:.3g} epochs instead of {wanted:g}: at most "
            f"{self.settings.warmup_max_share:.0%} of a run (--warmup-epochs overrides)"
        )

    def rate(self, step: int) -> float:
        """The rate of `step`, counted from 0. The first warm-up step is not 0, which would waste it."""
        rate = self._rate(step)
        if self.position is None:
            return rate
        first, batch = self.position(1), self.position(step + 1) - self.position(step)
        growth = self.settings.batch_growth
        return rate * growth.rate_factor(self.settings.batch_rate, batch, first)

    def others(self, step: int) -> dict[str, float]:
        """Values other than the rate that change with `step`, by their names in parameter groups."""
        time = self.time(step)
        schedule, optimizer = self._own
        return {**schedule.values(time, self.course), **optimizer.values(time, self.course)}

    def _rate(self, step: int) -> float:
        schedule, _ = self._own
        # The end of the step, as far as warm-up is concerned.
        done = self.time(step + 1)
        if schedule.WARMS_UP and done < self.warmup_steps:
            start = self.settings.warmup_start
            return start + (self.peak - start) * done / self.warmup_steps
        return schedule.rate(self.time(step), self.course)
