"""Learning rate, momentum and other values of a schedule, as pure functions of the step: a resumed run
needs no state of a schedule.

Times are counted in steps of the first batch, so that a schedule does not depend on how the batch grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from paceline.optim.rms_warmup import SGD_SHARE, sgd_share
from paceline.optim.settings import CYCLES, OPTIMIZERS_OF_SVRG, OptimSettings
from paceline.optim.svrg import DRAW

# Of `one_cycle` and `triangular`: lowest rate of a cycle, as a share of the peak rate.
CYCLE_FLOOR = 0.1
# Of `one_cycle`: share of the run after the cycle, in which the rate falls on to `lr_end`.
CYCLE_TAIL = 0.1


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
    """Linear warm-up from `warmup_start` to `peak`, then the decay that the settings name; or cycles,
    which are a warm-up of their own.

    `total_steps` and `steps_per_epoch` are those of the first batch. Where the batch grows, `position`
    gives the number of samples before a step.
    """

    settings: OptimSettings
    peak: float
    total_steps: float
    steps_per_epoch: float
    position: Callable[[int], int] | None = None

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

    def describe_cut(self) -> str:
        """Describes a warm-up shorter than `warmup_epochs`, or none; otherwise empty."""
        if self.settings.schedule in CYCLES and self.settings.warmup_epochs:
            return (
                f"none: {self.settings.schedule} rises by itself, optim.warmup_epochs = "
                f"{self.settings.warmup_epochs:g} is not used"
            )
        whole = self.settings.warmup_max_share == 1 or self.settings.schedule == "range"
        if whole or not self._cuts_warmup:
            return ""
        epochs = self.warmup_steps / self.steps_per_epoch
        return (
            f"{epochs:.3g} epochs instead of {self.settings.warmup_epochs:g}: at most "
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
        found: dict[str, float] = {}
        if self.settings.schedule in CYCLES and self.settings.cycle_momentum:
            low, high = self.settings.cycle_momentum
            found["momentum"] = high - (high - low) * self._height(self.time(step))
        if self.settings.name == "rmsprop_warmup":
            epoch = self.time(step) / self.steps_per_epoch
            center, width = self.settings.rms_center_epochs, self.settings.rms_width_epochs
            found[SGD_SHARE] = sgd_share(epoch, center, width)
        if self.settings.name in OPTIMIZERS_OF_SVRG:
            found[DRAW] = step
        return found

    def _rate(self, step: int) -> float:
        kind = self.settings.schedule
        if kind == "range":
            low, high = self.settings.range_lr
            share = min(step / (self.settings.range_steps - 1), 1.0)
            return float(low * (high / low) ** share)
        if kind in CYCLES:
            return self._cycled(self.time(step))
        # The end of the step, as far as warm-up is concerned.
        done = self.time(step + 1)
        if done < self.warmup_steps:
            start = self.settings.warmup_start
            return start + (self.peak - start) * done / self.warmup_steps
        return self._decayed(self.time(step))

    def _decayed(self, time: float) -> float:
        kind, end = self.settings.schedule, self.settings.lr_end
        if kind == "constant":
            return self.peak
        if kind in ("step", "piecewise"):
            passed = sum(
                time >= epoch * self.steps_per_epoch for epoch in self.settings.decay_epochs
            )
            if kind == "piecewise":
                return self.peak * self.settings.decay_factors[passed]
            return self.peak * float(self.settings.decay_rate**passed)
        over = self.settings.decay_over_epochs
        goal = self.total_steps if over is None else over * self.steps_per_epoch
        span = max(goal - self.warmup_steps, 1.0)
        left = 1.0 - min(max(time - self.warmup_steps, 0.0) / span, 1.0)
        if kind == "poly":
            return end + (self.peak - end) * float(left**self.settings.poly_power)
        assert kind == "cosine", kind
        return end + (self.peak - end) * 0.5 * (1.0 + math.cos(math.pi * (1.0 - left)))

    def _cycled(self, time: float) -> float:
        floor = self.peak * CYCLE_FLOOR
        tail = CYCLE_TAIL * self.total_steps
        if self.settings.schedule == "one_cycle" and time > self.total_steps - tail:
            left = max((self.total_steps - time) / tail, 0.0)
            return self.settings.lr_end + (floor - self.settings.lr_end) * left
        return floor + (self.peak - floor) * self._height(time)

    def _height(self, time: float) -> float:
        """Between the floor of a cycle, 0, and its peak, 1."""
        if self.settings.schedule == "one_cycle":
            whole = max((1.0 - CYCLE_TAIL) * self.total_steps, 1.0)
            return max(1.0 - abs(2.0 * time / whole - 1.0), 0.0)
        cycles, share = divmod(time / (self.settings.cycle_epochs * self.steps_per_epoch), 1.0)
        return float(self.settings.cycle_decay**cycles) * (1.0 - abs(2.0 * share - 1.0))
