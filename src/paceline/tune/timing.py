"""How benchmarks measure: times of repeated work after a warm-up, and the ranks of a benchmark.

Of several ranks the slowest counts; what is
compared takes turns, sample by sample (`interleaved`).
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist

from paceline.comm.group import Group
from paceline.comm.process_groups import ProcessGroups, all_gather_json
from paceline.comm.settings import BACKEND_GRACE_S
from paceline.config import RunConfig
from paceline.core.topology import Topology
from paceline.train.machine import choose_device


@dataclass(frozen=True)
class Times:
    """Seconds of each repetition."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The 10th and 90th percentile."""
        ordered = sorted(self.seconds)
        last = len(ordered) - 1
        return ordered[round(0.1 * last)], ordered[round(0.9 * last)]

    def to_row(self, name: str, scale: float = 1.0) -> dict[str, float]:
        """Median and spread, for a row of a benchmark."""
        parts = {name: self.median}
        parts[f"{name}_p10"], parts[f"{name}_p90"] = self.spread
        return {part: scale * seconds for part, seconds in parts.items()}


def steady_times(
    launch: Callable[[int], None],
    wait: Callable[[], object],
    *,
    lag: int,
    repeats: int,
    warm_up: int,
    ready: Callable[[], None] = lambda: None,
) -> Times:
    """Wall time between completed steps, with `lag` steps in flight.

    `ready` is called after a first part of the warm-up; it may block until the measurement may start.
    """
    first = max(warm_up // 2, 1)
    for number in range(first):
        launch(number)
        wait()
    ready()
    marks: list[float] = []
    for number in range(first, first + warm_up + repeats + lag + 1):
        launch(number)
        if number >= first + lag:
            wait()
            marks.append(time.perf_counter())
    for _ in range(lag):
        wait()
    return Times(tuple(b - a for a, b in itertools.pairwise(marks[-repeats - 1 :])))


# Rounds that are measured whatever the time limit, for a meaningful median.
_LEAST_ROUNDS = 3
_TIMEOUT_S = 300.0


class RankGroup:
    """A context manager. Methods are collectives: all ranks call them in the same order."""

    def __init__(
        self,
        *,
        backend: str = "auto",
        device: str = "auto",
        group_size: int | None = None,
        share_gpus: bool = False,
    ) -> None:
        self.topology = topology = Topology.from_env(os.environ)
        config = RunConfig().with_values(
            {
                "run.device": device, "comm.backend": backend, "comm.timeout_s": _TIMEOUT_S,
                "comm.share_gpus": share_gpus,
            }
        )  # fmt: skip
        self.device = choose_device(config, topology)
        self.share_gpus = share_gpus
        self._group_size = group_size
        shared = {"program": "bench", "backend": backend, "device": device}
        self.group = Group(topology, config.comm, self.device, shared=shared)
        self._value = torch.zeros(1, dtype=torch.float64, device=self.device)

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.world_size

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds of `work` on this rank, started at the same time on all ranks."""
        self.barrier()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start

    def barrier(self) -> None:
        self.agree_max(0.0)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            self.group.watched("the device", lambda: torch.cuda.synchronize(self.device))

    def agree_max(self, value: float) -> float:
        """The maximum over all ranks."""
        self._value.fill_(value)
        self._max(self._value)
        return float(self._value)

    def slowest(self, seconds: list[float]) -> list[float]:
        """The maximum over all ranks, for each sample."""
        row = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        self._max(row)
        return [float(value) for value in row]

    def _max(self, row: torch.Tensor) -> None:
        self.group.completed("a barrier", lambda: dist.all_reduce(row, op=dist.ReduceOp.MAX))

    def decided(self, decide: Callable[[], Any]) -> Any:
        """Rank 0's decision, as JSON, on every rank."""
        data = json.dumps(decide()).encode() if self.rank == 0 else None
        return json.loads(self.group.broadcast_bytes(data))

    def describe(self) -> dict[str, Any]:
        return {
            "ranks": self.size, "hosts": len(self.nodes),
            "ranks_per_host": [len(node) for node in self.nodes],
            "backend": self.group.backend, "device": str(self.device),
            "threads": torch.get_num_threads(),
        }  # fmt: skip

    def __enter__(self) -> Self:
        try:
            node_of_rank: list[int] = []

            def join() -> None:
                self.groups = ProcessGroups(
                    self.topology,
                    self._group_size,
                    timeout_s=_TIMEOUT_S,
                    grace_s=BACKEND_GRACE_S,
                )
                node_of_rank.extend(all_gather_json(self.topology.node_rank))

            self.group.watched("the creation of process groups", join)
        except BaseException:
            self.group.__exit__(*sys.exc_info())
            raise
        # The ranks of each host, independent of the requested groups.
        self.nodes = [
            [rank for rank, node in enumerate(node_of_rank) if node == number]
            for number in sorted(set(node_of_rank))
        ]
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.groups.close()
        self.group.__exit__(kind, error, trace)


def interleaved(
    ranks: RankGroup,
    ways: Mapping[str, Callable[[], object]],
    *,
    iterations: int,
    warm_up: int,
    prepare: Callable[[], object] = lambda: None,
    check: Callable[[str], object] = lambda name: None,
    limit_s: float | None = None,
) -> dict[str, list[float]]:
    """Samples of several ways to do the same, by name: the time of the slowest rank.

    Each round takes one sample of every way and starts with another one, so that other load on the
    machine affects all alike and ratios within one run are meaningful. `prepare` and `check` run
    before and after each sample, outside its time. Rounds stop early after `limit_s` seconds.
    """
    names = list(ways)
    taken: dict[str, list[float]] = {name: [] for name in names}
    begun = time.perf_counter()
    for number in range(warm_up + iterations):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            prepare()
            seconds = ranks.timed(ways[name])
            check(name)
            if number >= warm_up:
                taken[name].append(seconds)
        if limit_s is not None and number - warm_up >= _LEAST_ROUNDS - 1:
            # All ranks must stop in the same round, so rank 0's clock decides.
            late = ranks.rank == 0 and time.perf_counter() - begun > limit_s
            if ranks.agree_max(float(late)) > 0:
                break
    return {name: ranks.slowest(seconds) for name, seconds in taken.items()}
