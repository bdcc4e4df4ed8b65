"""`paceline bench allreduce`: compares all-reduce algorithms with the backend's own at several sizes.

Each row of the result has the columns of nccl-tests (size, time, algbw, busbw), the spread of the
times, all samples, and the speed relative to the backend's own all-reduce (`native`) in the same
run. The first result of each algorithm and size is checked completely, and every later result at
its first and last element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.hybrid import HybridAllReduce
from paceline.comm.planned_transport import PlannedAllReduce, WireFormat
from paceline.core.errors import CommError
from paceline.plan.size_table import SizeTable
from paceline.plan.wires import wire_format
from paceline.tune.timing import RankGroup, Times, interleaved

NATIVE = "native"
_PERIOD = 3


@dataclass(frozen=True)
class AllReduceJob:
    """The sizes, algorithms and numbers of samples of a measurement.

    Attributes:
        sizes: The sizes of the float32 buffers in bytes.
        algorithms: The names of the all-reduce algorithms.
        wire: The wire format; `native` always sums float32.
        iterations: The number of timed samples of each size and algorithm.
        warm_up: The number of samples before the timed samples.
    """

    sizes: tuple[int, ...]
    algorithms: tuple[str, ...]
    wire: str = "float32"
    iterations: int = 20
    warm_up: int = 3


class AllReduceBench:
    """Measures all-reduces. Each algorithm has one all-reduce object, which is used for all sizes."""

    def __init__(self, ranks: RankGroup, job: AllReduceJob) -> None:
        self._ranks, self._job = ranks, job
        self._all_reduces: dict[str, Callable[[Tensor], object]] = {NATIVE: dist.all_reduce}
        if own := wire_format(job.wire).algorithm:
            planned = PlannedAllReduce(ranks.groups, [job.wire])
            self._all_reduces[own] = lambda buffer: planned.carry(buffer, own, job.wire)
            return
        for name in job.algorithms:
            if name != NATIVE:
                table = SizeTable.single(name)
                self._all_reduces[name] = HybridAllReduce(ranks.groups, table, job.wire).all_reduce

    def measure(self, size: int) -> list[dict[str, Any]]:
        """Measures all algorithms at one buffer size in bytes.

        Returns one result row per algorithm, `native` first.
        """
        job, ranks = self._job, self._ranks
        buffer = torch.empty(max(size // 4, 1), device=ranks.device)
        calls = {name: partial(run, buffer) for name, run in self._all_reduces.items()}
        pattern = Pattern(buffer.numel(), ranks.rank, ranks.size, job.wire, ranks.device)
        for name, call in calls.items():
            pattern.fill(buffer)
            call()
            pattern.check(buffer, name, ranks)
        samples = interleaved(
            ranks, calls, iterations=job.iterations, warm_up=job.warm_up,
            prepare=lambda: buffer.fill_(1.0),
            check=lambda name: pattern.check_ends(buffer, name),
        )  # fmt: skip
        times = {name: Times(tuple(seconds)) for name, seconds in samples.items()}
        return [self._row(buffer.nbytes, n, t, times[NATIVE].median) for n, t in times.items()]

    def _row(self, size: int, name: str, times: Times, native_s: float) -> dict[str, Any]:
        p, median = self._ranks.size, times.median
        return {
            "bytes": size, "algorithm": name, **times.to_row("s"),
            "algbw_gb_s": size / median / 1e9,
            "busbw_gb_s": size / median / 1e9 * 2 * (p - 1) / p,
            "speed_against_native": native_s / median,
            "samples_s": list(times.seconds),
        }  # fmt: skip


def choose_sizes(least: int, most: int, factor: float) -> tuple[int, ...]:
    """Returns buffer sizes from `least` to `most` that grow by `factor`, as multiples of 4 bytes."""
    sizes: list[int] = []
    size = float(least)
    while size <= most * (1 + 1e-9):
        whole = max(round(size / 4) * 4, 4)
        if not sizes or whole > sizes[-1]:
            sizes.append(whole)
        size *= factor
    return tuple(sizes)


class Pattern:
    """Test values whose sum over all ranks is known: element i on rank r is (i + r) mod 3."""

    def __init__(
        self, length: int, rank: int, world_size: int, wire: str, device: torch.device
    ) -> None:
        self._own = (torch.arange(length, device=device) + rank) % _PERIOD
        at = torch.arange(length, device=device) % _PERIOD
        sums = [sum((n + r) % _PERIOD for r in range(world_size)) for n in range(_PERIOD)]
        self._sum = torch.tensor(sums, dtype=torch.float32, device=device)[at]
        self._ones = float(world_size)
        largest_sum = 2.0 * world_size
        wire_kind = wire_format(wire)
        if wire_kind.algorithm:
            # The numbers of each rank are rounded once, and so is the sum.
            self._tolerance = 2 * largest_sum * wire_kind.roundoff
            return
        unit = WireFormat.named(wire).unit_roundoff
        # Integers are exact up to 1 / (2 · unit roundoff); beyond, each rank may round once.
        self._tolerance = 0.0 if largest_sum * unit <= 0.5 else largest_sum * unit * world_size

    def fill(self, buffer: Tensor) -> None:
        """Writes this rank's test values into a buffer."""
        buffer.copy_(self._own)

    def check(self, buffer: Tensor, name: str, ranks: RankGroup) -> None:
        """Checks every element of a summed buffer. If one is wrong on any rank, all raise CommError."""
        wrong = int(((buffer - self._sum).abs() > self._tolerance).sum())
        if ranks.agree_max(float(wrong)) > 0:
            raise _wrong_sum(name, buffer, f"{wrong} elements are wrong on rank {ranks.rank}")

    def check_ends(self, buffer: Tensor, name: str) -> None:
        """Checks the first and last element of the sum of buffers that were filled with ones."""
        for value in (float(buffer[0]), float(buffer[-1])):
            if abs(value - self._ones) > self._tolerance:
                raise _wrong_sum(name, buffer, f"{value} instead of {self._ones:g}")


def _wrong_sum(name: str, buffer: Tensor, problem: str) -> CommError:
    return CommError(
        f"{name} all-reduce of {buffer.nbytes} bytes gave a wrong sum: {problem}",
        "please report this with the command line",
    )
