"""Shares of the global batch in proportion to the speed of ranks.

A synchronous step takes as long as its slowest rank. Where ranks differ (a slow node, two kinds of GPU),
`run.shares` gives each a part of every global batch in proportion to what it computes in a second: given
as numbers, measured before the first step (`probe`), or measured again at checkpoints (`run.rebalance`).
The loss of a rank is divided by the samples of all ranks, so the summed gradient is the mean over true
samples whatever the shares are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch

from paceline.comm.group import Group
from paceline.config import EQUAL_SHARES, PROBED_SHARES, RunConfig
from paceline.core.errors import ConfigError
from paceline.data import BatchPlan
from paceline.train.checkpoint import Checkpoint

_WARM_UP, _SAMPLES = 2, 5
# Batch norm needs two samples in a micro-batch.
_LEAST = 2
# A new division must shift more than this part of an equal share, or it is noise.
_WORTHWHILE = 0.05


def apportion(
    total: int, speeds: Sequence[float], unit: int = 1, least: int = 1
) -> tuple[int, ...]:
    """`total` in whole units, in proportion to `speeds`, at least `least` units for each: the largest
    remainders (Hamilton's method) are rounded up; of equal ones the first."""
    units = total // unit
    least = min(least, units // len(speeds))
    spare, weight = units - least * len(speeds), sum(speeds)
    exact = [spare * speed / weight for speed in speeds]
    # Whoever is entitled to no more than the least has it; the others share the rest by speed.
    goal = [max(units * speed / weight - least, 0.0) for speed in speeds]
    if sum(goal) > 0:
        exact = [spare * part / sum(goal) for part in goal]
    found = [int(part) for part in exact]
    order = sorted(range(len(speeds)), key=lambda rank: (found[rank] - exact[rank], rank))
    for rank in order[: spare - sum(found)]:
        found[rank] += 1
    return tuple(unit * (least + part) for part in found)


def with_shares(
    config: RunConfig, plan: BatchPlan, group: Group, checkpoint: Checkpoint | None,
    compute: Callable[[], None],
) -> tuple[BatchPlan, str]:  # fmt: skip
    """The plan with the shares of the settings or of the checkpoint, and a note on them. `compute` runs
    one micro-batch of an equal share forward and backward."""
    wanted = config.run.shares
    given = None
    if wanted not in (EQUAL_SHARES, PROBED_SHARES):
        given = given_speeds(wanted, group.world_size)
    if wanted == EQUAL_SHARES or group.world_size == 1:
        return plan, ""
    kept = _of_checkpoint(config, plan, checkpoint)
    if kept is not None:
        return replace(plan, shares=kept), f"{_shown(kept)} (as in the checkpoint)"
    if given is not None:
        speeds, note = given, "given"
    else:
        speeds = measure_speeds(group, compute, plan.micro_batch)
        note = "by speed: " + ", ".join(f"{speed:.0f}" for speed in speeds) + " images/s"
    shares = divide(plan, speeds)
    return replace(plan, shares=shares), f"{_shown(shares)} ({note})"


def divide(plan: BatchPlan, speeds: Sequence[float]) -> tuple[int, ...]:
    """Each rank's samples of a full global batch: equal micro-batches within a rank."""
    return apportion(plan.global_batch, speeds, plan.accumulation, _LEAST)


def given_speeds(text: str, ranks: int) -> list[float]:
    speeds = [float(part) for part in text.split(":")]
    if len(speeds) != ranks:
        raise ConfigError(
            "run.shares", text, f"has {len(speeds)} numbers, but there are {ranks} ranks",
            "give one for each rank, or use 'probe'",
        )  # fmt: skip
    return speeds


def measure_speeds(group: Group, compute: Callable[[], None], samples: int) -> list[float]:
    """Samples a second of every rank. All compute at the same time, as in training: ranks of a node
    share its cores. A collective."""
    times = []
    for turn in range(_WARM_UP + _SAMPLES):
        # A barrier, so that no rank measures while another has ended.
        group.all_reduce_sum(torch.zeros((), device=group.device))
        started = time.perf_counter()
        compute()
        if turn >= _WARM_UP:
            times.append(time.perf_counter() - started)
    return gather_numbers(group, samples / median(times))


def gather_numbers(group: Group, own: float) -> list[float]:
    """Every rank's number, on all ranks. A collective."""
    row = torch.zeros(group.world_size, dtype=torch.float64, device=group.device)
    row[group.rank] = own
    group.all_reduce_sum(row)
    return [float(value) for value in row.tolist()]


class Rebalance:
    """Decides shares again from the times of the steps since the last decision."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._busy_s: list[float] = []

    def note(self, step_s: float, waited_s: float) -> None:
        """A step's time, and how much of it this rank waited for the exchange, and so for others."""
        self._busy_s.append(max(step_s - waited_s, 1e-9))

    def decide(self, plan: BatchPlan) -> BatchPlan:
        """The plan with new shares, or the same one where they would be about the same. A collective:
        all ranks have done the same steps."""
        if len(self._busy_s) < _SAMPLES:
            return plan
        busy, self._busy_s = self._busy_s, []
        shares = plan.shares or (plan.global_batch // plan.world_size,) * plan.world_size
        speeds = gather_numbers(self._group, shares[self._group.rank] / median(busy))
        found = divide(plan, speeds)
        equal = plan.global_batch / plan.world_size
        moved = max(abs(new - old) for new, old in zip(found, shares, strict=True))
        return replace(plan, shares=found) if moved > _WORTHWHILE * equal else plan


def _of_checkpoint(
    config: RunConfig, plan: BatchPlan, checkpoint: Checkpoint | None
) -> tuple[int, ...] | None:
    """A resumed run keeps the shares, to be bit-identical, where neither ranks nor settings differ."""
    if checkpoint is None or checkpoint.world_size != plan.world_size:
        return None
    saved = checkpoint.sampler.get("shares")
    if not saved or checkpoint.config.get("run", {}).get("shares") != config.run.shares:
        return None
    if len(saved) != plan.world_size or sum(saved) != plan.global_batch or min(saved) < 1:
        return None
    return tuple(int(share) for share in saved)


def _shown(shares: Sequence[int]) -> str:
    """`40:40:40:8 samples`; where ranks are many, the smallest and the largest."""
    if len(shares) > 8:
        return f"{min(shares)} to {max(shares)} samples a rank"
    return ":".join(str(share) for share in shares) + " samples"
