"""Implements the strategy `unequal`: divides the global batch in proportion to the speed of ranks.

A synchronous step takes as long as the slowest rank needs. If ranks differ (a slow node, two kinds of
GPU), `Unequal` divides every global batch in proportion to the ranks' speeds. The speeds are given,
measured before the first step (`probe`), or measured again at checkpoints (`rebalance`). Each rank
divides the loss by the number of samples on all ranks, so the sum of gradients is the mean over samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from paceline.alternatives.unequal.settings import UnequalSettings
from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.data import BatchPlan
from paceline.train.step import StepOutcome
from paceline.train.strategy import Synchronous

_WARM_UP, _SAMPLES = 2, 5
# Batch norm needs two samples in a micro-batch.
_LEAST = 2
# A new division must change some rank's part by more than this fraction of an equal part. Smaller
# changes are noise.
_WORTHWHILE = 0.05


class Unequal(Synchronous):
    """Synchronous training in which faster ranks get more samples of the batch.

    A resumed run with the same ranks and settings keeps the division of the checkpoint, to be
    bit-identical.
    """

    name = "unequal"
    several_ranks = True
    one_batch = "run.strategy = 'unequal' divides a constant one"
    fixed_ranks = "the shares are those of all ranks"
    equal_parts = "run.strategy = 'unequal' divides the batch itself"

    def __init__(self, config: RunConfig, group: Group) -> None:
        super().__init__(config, group)
        self._settings = config.run.of(self.name, UnequalSettings)
        self._shares: tuple[int, ...] = ()
        self._saved: Mapping[str, Any] = {}
        self._note = ""
        # Seconds that this rank was busy, not waiting, in each step since the last division.
        self._busy_s: list[float] = []

    @classmethod
    def check(cls, config: RunConfig, ranks: int) -> None:
        settings = config.run.of(cls.name, UnequalSettings)
        if settings.speeds and len(settings.speeds) != ranks:
            raise ConfigError(
                "run.unequal.shares", settings.shares,
                f"has {len(settings.speeds)} numbers, but there are {ranks} ranks",
                "give one number per rank, or use 'probe'",
            )  # fmt: skip

    def load(self, saved: Mapping[str, Any]) -> None:
        self._saved = saved

    def state(self) -> dict[str, Any]:
        return {"shares": list(self._shares), "asked": self._settings.shares}

    def divide(self, plan: BatchPlan, compute: Callable[[], None]) -> BatchPlan:
        kept = tuple(int(share) for share in self._saved.get("shares", ()))
        fits = len(kept) == plan.world_size and sum(kept) == plan.global_batch and min(kept) > 0
        if fits and self._saved.get("asked") == self._settings.shares:
            self._shares, note = kept, "as in the checkpoint"
        elif self._settings.speeds:
            self._shares, note = _divide(plan, self._settings.speeds), "given"
        else:
            speeds = _measure_speeds(self.group, compute, plan.micro_batch)
            self._shares = _divide(plan, speeds)
            note = "by speed: " + ", ".join(f"{speed:.0f}" for speed in speeds) + " images/s"
        self._note = f"{_shown(self._shares)} ({note})"
        return replace(plan, shares=self._shares)

    def describe(self) -> dict[str, str]:
        return {"shares": self._note}

    def record(self, outcome: StepOutcome) -> Mapping[str, Any]:
        self._busy_s.append(max(outcome.step_s - outcome.exposed_comm_s, 1e-9))
        return outcome.fields

    def replan(self, plan: BatchPlan) -> BatchPlan:
        """Returns a plan that divides batches by measured speeds, or `plan` if little would change."""
        if not self._settings.rebalance or len(self._busy_s) < _SAMPLES:
            return plan
        busy, self._busy_s = self._busy_s, []
        speeds = _gather_numbers(self.group, self._shares[self.group.rank] / median(busy))
        shares = _divide(plan, speeds)
        equal = plan.global_batch / plan.world_size
        moved = max(abs(new - old) for new, old in zip(shares, self._shares, strict=True))
        if moved <= _WORTHWHILE * equal:
            return plan
        self._shares = shares
        return replace(plan, shares=shares)


def apportion(
    total: int, speeds: Sequence[float], unit: int = 1, least: int = 1
) -> tuple[int, ...]:
    """Divides a number in proportion to speeds, by largest remainders (Hamilton's method).

    Args:
        total: Number to divide, a multiple of `unit`.
        speeds: Speed of each rank, in any unit.
        unit: All parts are multiples of this number.
        least: Minimum part of a rank, in multiples of `unit`.

    Returns:
        The part of each rank. If remainders are equal, the first of these ranks is rounded up.
    """
    units = total // unit
    least = min(least, units // len(speeds))
    spare, weight = units - least * len(speeds), sum(speeds)
    exact = [spare * speed / weight for speed in speeds]
    # Slow ranks get the minimum. The remaining units are divided among the faster ranks by speed.
    goal = [max(units * speed / weight - least, 0.0) for speed in speeds]
    if sum(goal) > 0:
        exact = [spare * part / sum(goal) for part in goal]
    parts = [int(part) for part in exact]
    order = sorted(range(len(speeds)), key=lambda rank: (parts[rank] - exact[rank], rank))
    for rank in order[: spare - sum(parts)]:
        parts[rank] += 1
    return tuple(unit * (least + part) for part in parts)


def _divide(plan: BatchPlan, speeds: Sequence[float]) -> tuple[int, ...]:
    """Returns each rank's number of samples in a global batch, a multiple of its micro-batches."""
    return apportion(plan.global_batch, speeds, plan.accumulation, _LEAST)


def _measure_speeds(group: Group, compute: Callable[[], None], samples: int) -> list[float]:
    """Measures the samples per second of every rank. All ranks call this.

    All ranks compute at the same time, as in training, because ranks of a node share its cores.
    """
    times = []
    for turn in range(_WARM_UP + _SAMPLES):
        # A barrier, so that no rank measures while another is idle.
        group.all_reduce_sum(torch.zeros((), device=group.device))
        started = time.perf_counter()
        compute()
        if turn >= _WARM_UP:
            times.append(time.perf_counter() - started)
    return _gather_numbers(group, samples / median(times))


def _gather_numbers(group: Group, own: float) -> list[float]:
    """Returns the numbers that all ranks pass as `own`. All ranks call this."""
    row = torch.zeros(group.world_size, dtype=torch.float64, device=group.device)
    row[group.rank] = own
    group.all_reduce_sum(row)
    return [float(value) for value in row.tolist()]


def _shown(shares: Sequence[int]) -> str:
    """Returns a text such as `40:40:40:8 samples`, or for many ranks the smallest and largest number."""
    if len(shares) > 8:
        return f"{min(shares)} to {max(shares)} samples a rank"
    return ":".join(str(share) for share in shares) + " samples"
