"""Times of repeated work after a warm-up, and the ranks of a benchmark.

With several ranks the slowest one counts. Alternatives take turns, sample by sample (`interleaved`).
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
from paceline.comm.process_groups import ProcessGroups, all_gather_json, group_ranks
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
        """Returns the 10th and 90th percentile."""
        ordered = sorted(self.seconds)
        last = len(ordered) - 1
        return ordered[round(0.1 * last)], ordered[round(0.9 * last)]

    def to_row(self, name: str, scale: float = 1.0) -> dict[str, float]:
        """Returns median and spread, for a row of a benchmark."""
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
    """Returns the wall time between completed steps, with `lag` steps in flight.

    Args:
        launch: Starts the step of this number.
        wait: Waits for the oldest step in flight.
        lag: Number of steps in flight.
        repeats: Number of measured steps.
        warm_up: Number of steps before them.
        ready: Called after a first part of the warm-up. It may block until the measurement may start.
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


# Rounds that are measured regardless of the time limit, for a meaningful median.
_LEAST_ROUNDS = 3
_TIMEOUT_S = 300.0


class RankGroup:
    """The ranks of a benchmark. All ranks call its methods in the same order.

    Args:
        backend: The backend of torch.distributed.
        device: The device.
        group_size: The number of ranks in a group. None takes the ranks of a node.
        share_gpus: Allow several ranks on one GPU.
    """

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
        """Returns the seconds of `work` on this rank, started at the same time on all ranks."""
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
        """Returns the maximum over all ranks."""
        self._value.fill_(value)
        self._max(self._value)
        return float(self._value)

    def slowest(self, seconds: list[float]) -> list[float]:
        """Returns the maximum over all ranks, for each sample."""
        row = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        self._max(row)
        return [float(value) for value in row]

    def _max(self, row: torch.Tensor) -> None:
        self.group.completed("a barrier", lambda: dist.all_reduce(row, op=dist.ReduceOp.MAX))

    def decided(self, decide: Callable[[], Any]) -> Any:
        """Returns rank 0's decision, as JSON, on every rank."""
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
            self.groups = self.group.watched(
                "the creation of process groups",
                lambda: ProcessGroups(
                    self.topology, self._group_size, timeout_s=_TIMEOUT_S, grace_s=BACKEND_GRACE_S
                ),
            )
            node_of_rank = self.group.watched(
                "the gathering of nodes", lambda: all_gather_json(self.topology.node_rank)
            )
        except BaseException:
            self.group.__exit__(*sys.exc_info())
            raise
        # The ranks of each host, independent of the requested groups.
        self.nodes = group_ranks(node_of_rank)
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
    """Returns samples of several functions, by name: the time of the slowest rank.

    Each round takes one sample of every function and starts with another one. So other load on the
    machine affects all alike, and ratios within one run are meaningful.

    Args:
        ranks: The ranks.
        ways: The functions by name.
        iterations: Number of samples.
        warm_up: Number of rounds before them.
        prepare: Called before each sample, outside its time.
        check: Called with the name after each sample, outside its time.
        limit_s: Rounds stop after so many seconds.
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
