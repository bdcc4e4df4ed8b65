"""`paceline tune`: measures this cluster and makes its table of sizes.

In: joined ranks and a `TuneJob`. Out: a `TuningFile`, the same on every rank. Each size is screened by a
single sample of every algorithm; those that come near the best are then sampled in turn. Sizes ascend,
and those that the time limit leaves no room for are left out and told. Rank 0 decides, all follow.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch

from paceline.bench.hidden_cost import hidden_cost
from paceline.bench.ranks import RankGroup, interleaved
from paceline.comm.hybrid import HybridAllReduce
from paceline.comm.link_probe import LinkProbe
from paceline.comm.size_table import SizeTable
from paceline.comm.tuning_choice import (
    NATIVE,
    MeasuredSize,
    choose_algorithms,
    table_of,
)
from paceline.comm.tuning_file import ClusterShape, LinkFacts, TuningFile
from paceline.core.host_load import CoreUse, HostLoad, foreign_share

# An algorithm that takes this many times as long as the best once is not sampled again.
_SCREEN = 1.6
_SCREENING_ROUNDS = 2


@dataclass(frozen=True)
class TuneJob:
    """`limit_s` bounds the sampling of all sizes together; at least one size is measured."""

    sizes: tuple[int, ...]
    algorithms: tuple[str, ...]
    iterations: int = 12
    limit_s: float = 180.0
    margin: float = 0.05


Tell = Callable[[MeasuredSize], None]


class Tuner:
    """Every method is called by all ranks alike."""

    def __init__(self, ranks: RankGroup, job: TuneJob) -> None:
        self._ranks, self._job = ranks, job
        self._load = HostLoad()
        names = dict.fromkeys((NATIVE, *job.algorithms))
        self._made = {name: HybridAllReduce(ranks.groups, SizeTable.single(name)) for name in names}

    def cluster(self) -> ClusterShape:
        """Probes the links, and what hiding an exchange costs."""
        ranks = self._ranks
        assert ranks.groups.world is not None
        probe = LinkProbe(ranks.groups.world, ranks.rank, ranks.nodes, ranks.device)
        counts = tuple(len(node) for node in ranks.nodes)
        found: list[tuple[LinkFacts | None, LinkFacts | None]] = []
        ranks.group.watched(
            "the probe of the links", lambda: found.append((probe.inside(), probe.between()))
        )
        ((inside, between),) = found
        return ClusterShape(
            ranks.size, counts, ranks.group.backend, ranks.device.type, inside, between,
            hidden_cost(ranks),
        )  # fmt: skip

    def measure(self, tell: Tell) -> list[MeasuredSize]:
        """All sizes that there is time for."""
        found: list[MeasuredSize] = []
        start, last_s = time.perf_counter(), 0.0
        for at, size in enumerate(self._job.sizes):
            begun = time.perf_counter()
            left_s = self._job.limit_s - (begun - start)
            share_s = left_s / (len(self._job.sizes) - at)
            # Sizes ascend: the next takes as long as the last, at least. All go by rank 0's clock.
            late = self._ranks.rank == 0 and bool(found) and left_s < last_s
            if self._ranks.agree_max(float(late)) > 0:
                break
            found.append(self._measure(size, share_s))
            last_s = time.perf_counter() - begun
            tell(found[-1])
        return found

    def _measure(self, size: int, limit_s: float) -> MeasuredSize:
        buffer = torch.empty(max(size // 4, 1), device=self._ranks.device)
        ways: dict[str, Callable[[], object]] = {
            name: _calling(made, buffer) for name, made in self._made.items()
        }

        def zero() -> None:
            buffer.zero_()

        screened = interleaved(
            self._ranks, ways, iterations=_SCREENING_ROUNDS, warm_up=1, prepare=zero
        )
        kept = self._ranks.decided(lambda: near_the_best(screened))
        samples = interleaved(
            self._ranks, {name: ways[name] for name in kept}, iterations=self._job.iterations,
            warm_up=0, prepare=zero, limit_s=limit_s,
        )  # fmt: skip
        return MeasuredSize.of(size, {**screened, **samples})

    def foreign_share(self) -> float:
        """What other processes than these ranks used of the busiest machine's cores so far."""
        use = self._load.use()
        told = self._ranks.group.gather_bytes(json.dumps(asdict(use) if use else None).encode())

        def decide() -> float:
            tables = [json.loads(text) for text in told or []]
            return foreign_share([CoreUse(**table) for table in tables if table is not None])

        return float(self._ranks.decided(decide))

    def conclude(self, measured: list[MeasuredSize], cluster: ClusterShape) -> TuningFile:
        """Rank 0's choice."""
        chosen = self._ranks.decided(lambda: choose_algorithms(measured, self._job.margin))
        return TuningFile(table_of(measured, chosen), tuple(measured), tuple(chosen), cluster)


def near_the_best(screened: Mapping[str, list[float]]) -> list[str]:
    """Those worth more samples; the backend's own always is."""
    best = min(min(taken) for taken in screened.values())
    return [
        name for name, taken in screened.items() if name == NATIVE or min(taken) <= _SCREEN * best
    ]


def _calling(made: HybridAllReduce, buffer: torch.Tensor) -> Callable[[], object]:
    return lambda: made.all_reduce(buffer)
