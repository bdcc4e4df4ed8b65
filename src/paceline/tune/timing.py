"""Measures the time of repeated work after a warm-up, on one or several ranks.

With several ranks, a sample is the time of the slowest one. Alternatives that are compared take
turns, sample by sample (`interleaved`).
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
    """The seconds that each repetition of some work took, with median and percentiles."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The 10th and the 90th percentile in seconds."""
        ordered = sorted(self.seconds)
        last = len(ordered) - 1
        return ordered[round(0.1 * last)], ordered[round(0.9 * last)]

    def to_row(self, name: str, scale: float = 1.0) -> dict[str, float]:
        """Returns the median as `name` and the percentiles as `name_p10` and `name_p90`.

        Args:
            name: The name of the median.
            scale: The factor for all values; 1000 converts seconds to milliseconds.
        """
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
    """Returns the wall time between the ends of successive steps, with `lag` steps in flight.

    Args:
        launch: Starts a step; receives the number of the step.
        wait: Waits until the oldest step in flight has ended.
        lag: Number of steps that are still in flight after each `wait`.
        repeats: Number of measured steps.
        warm_up: Number of steps before the measured ones.
        ready: Called once during the warm-up. It may block until the measurement may start.
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


# The least number of rounds, even beyond the time limit, so that the median is meaningful.
_LEAST_ROUNDS = 3
_TIMEOUT_S = 300.0


class RankGroup:
    """The process group of a benchmark. All ranks must call the methods in the same order.

    Args:
        backend: The backend of torch.distributed, or `auto`.
        device: The device of each rank, or `auto`.
        group_size: The number of ranks in a group of `ProcessGroups`. None means all ranks of a
            node.
        share_gpus: True to allow several ranks on one GPU.
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
        """Runs `work` at the same time on all ranks, and returns the seconds on this rank."""
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
        """Returns the maximum of `value` over all ranks."""
        self._value.fill_(value)
        self._max(self._value)
        return float(self._value)

    def slowest(self, seconds: list[float]) -> list[float]:
        """Returns, for each sample, the time of the slowest rank."""
        row = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        self._max(row)
        return [float(value) for value in row]

    def _max(self, row: torch.Tensor) -> None:
        self.group.completed("a barrier", lambda: dist.all_reduce(row, op=dist.ReduceOp.MAX))

    def decided(self, decide: Callable[[], Any]) -> Any:
        """Calls `decide` on rank 0, and returns the result (JSON data) on all ranks."""
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
    """Times several functions in turn, and returns the samples of each in seconds, by name.

    A sample is the time of the slowest rank. Each round takes one sample of every function, and
    each round begins with a different function. So other load on the machine affects all functions
    alike, and the ratios of their times are meaningful.

    Args:
        ranks: The ranks, which all call this function.
        ways: The functions to time, by name.
        iterations: Number of measured rounds, and so of samples of each function.
        warm_up: Number of rounds before the measured ones.
        prepare: Called before each sample, outside the measured time.
        check: Called with the function's name after each sample, outside the measured time.
        limit_s: Seconds after which no further round starts, once three rounds are measured.
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
            # All ranks must stop after the same round, so rank 0's clock decides.
            late = ranks.rank == 0 and time.perf_counter() - begun > limit_s
            if ranks.agree_max(float(late)) > 0:
                break
    return {name: ranks.slowest(seconds) for name, seconds in taken.items()}
