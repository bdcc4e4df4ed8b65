"""`paceline bench allreduce`: sizes × algorithms, compared with the backend's own all-reduce.

Rows have the columns of nccl-tests (size, time, algbw, busbw), spread, samples, and speed relative to
`native` in the same run. Every result is checked, that of the warm-up in every element.
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
HYBRID = "hybrid"
_PERIOD = 3


@dataclass(frozen=True)
class AllReduceJob:
    """`sizes` are bytes of the float32 buffer, `wire` the format that is sent; `native` always sums
    float32."""

    sizes: tuple[int, ...]
    algorithms: tuple[str, ...]
    table: SizeTable | None = None
    wire: str = "float32"
    iterations: int = 20
    warm_up: int = 3
    limit_s: float | None = None


class AllReduceBench:
    """Keeps the algorithms, with their memory, for all sizes."""

    def __init__(self, ranks: RankGroup, job: AllReduceJob) -> None:
        self._ranks, self._job = ranks, job
        self._made: dict[str, HybridAllReduce | _OwnAllReduce] = {}
        if own := wire_format(job.wire).algorithm:
            self._made[own] = _OwnAllReduce(ranks, own, job.wire)
            return
        for name in job.algorithms:
            if name not in (NATIVE, HYBRID):
                table = SizeTable.single(name)
                self._made[name] = HybridAllReduce(ranks.groups, table, job.wire)
        if job.table is not None:
            self._made[HYBRID] = HybridAllReduce(ranks.groups, job.table, job.wire)

    def measure(self, size: int) -> list[dict[str, Any]]:
        """Rows of one size, `native` first."""
        job, ranks = self._job, self._ranks
        buffer = torch.empty(max(size // 4, 1), device=ranks.device)
        ways: dict[str, Callable[[], object]] = {NATIVE: lambda: dist.all_reduce(buffer)}
        for name, made in self._made.items():
            ways[name] = partial(made.all_reduce, buffer)
        pattern = Pattern(buffer.numel(), ranks.rank, ranks.size, job.wire, ranks.device)
        for name, way in ways.items():
            pattern.fill(buffer)
            way()
            pattern.check(buffer, name, ranks)
        samples = interleaved(
            ranks, ways, iterations=job.iterations, warm_up=job.warm_up, limit_s=job.limit_s,
            prepare=lambda: buffer.fill_(1.0),
            check=lambda name: pattern.check_ends(buffer, name),
        )  # fmt: skip
        native = Times(tuple(samples[NATIVE])).median
        rows = []
        for name, seconds in samples.items():
            rows.append(self._row(size, name, Times(tuple(seconds)), native))
            if isinstance(by_size := self._made.get(name), HybridAllReduce) and name == HYBRID:
                rows[-1]["chosen"] = by_size.choose(buffer)
        return rows

    def _row(self, size: int, name: str, times: Times, native_s: float) -> dict[str, Any]:
        size = max(size // 4, 1) * 4
        p, median = self._ranks.size, times.median
        return {
            "bytes": size, "algorithm": name, **times.to_row("s"),
            "algbw_gb_s": size / median / 1e9,
            "busbw_gb_s": size / median / 1e9 * 2 * (p - 1) / p,
            "speed_against_native": native_s / median,
            "samples_s": list(times.seconds),
        }  # fmt: skip


class _OwnAllReduce:
    """A format's own all-reduce, without memory: the sum of one call does not depend on earlier ones."""

    def __init__(self, ranks: RankGroup, algorithm: str, wire: str) -> None:
        self._planned = PlannedAllReduce(ranks.groups, [wire])
        self._algorithm, self._wire = algorithm, wire

    def all_reduce(self, buffer: Tensor) -> None:
        self._planned.carry(buffer, self._algorithm, self._wire)


def choose_sizes(least: int, most: int, factor: float) -> tuple[int, ...]:
    """`least`, then times `factor` up to `most`, as multiples of 4 bytes."""
    sizes: list[int] = []
    size = float(least)
    while size <= most * (1 + 1e-9):
        whole = max(round(size / 4) * 4, 4)
        if not sizes or whole > sizes[-1]:
            sizes.append(whole)
        size *= factor
    return tuple(sizes)


class Pattern:
    """Fills a buffer with numbers whose sum over ranks is known: element i on rank r is (i + r) mod
    3."""

    def __init__(
        self, length: int, rank: int, world_size: int, wire: str, device: torch.device
    ) -> None:
        self._own = (torch.arange(length, device=device) + rank) % _PERIOD
        at = torch.arange(length, device=device) % _PERIOD
        sums = [sum((n + r) % _PERIOD for r in range(world_size)) for n in range(_PERIOD)]
        self._sum = torch.tensor(sums, dtype=torch.float32, device=device)[at]
        self._ones = float(world_size)
        # Integers are exact up to 1 / (2 · unit roundoff); beyond, each rank may round once.
        most = 2.0 * world_size
        form = wire_format(wire)
        if form.algorithm:
            # Each rank's numbers are rounded once, and the sum.
            self._tolerance = 2 * most * form.roundoff
            return
        unit = WireFormat.named(wire).unit_roundoff
        self._tolerance = 0.0 if most * unit <= 0.5 else most * unit * world_size

    def fill(self, buffer: Tensor) -> None:
        buffer.copy_(self._own)

    def check(self, buffer: Tensor, name: str, ranks: RankGroup) -> None:
        """Checks every element; all ranks raise if one is wrong on any rank."""
        wrong = int(((buffer - self._sum).abs() > self._tolerance).sum())
        if ranks.agree_max(float(wrong)) > 0:
            raise CommError(
                f"{name} all-reduce of {buffer.nbytes} bytes is wrong: {wrong} elements on rank "
                f"{ranks.rank}",
                "please report this with the command line",
            )

    def check_ends(self, buffer: Tensor, name: str) -> None:
        """Checks the first and last element of a buffer that was filled with ones."""
        for value in (float(buffer[0]), float(buffer[-1])):
            if abs(value - self._ones) > self._tolerance:
                raise CommError(
                    f"{name} all-reduce of {buffer.nbytes} bytes gave {value}, not {self._ones:g}",
                    "please report this with the command line",
                )
