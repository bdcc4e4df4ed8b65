"""`RankGroup`: the ranks of a measurement, joined.

In: what the launcher left in the environment, a backend and a device. Out: the group of all ranks and
the process groups of the communication module, closed at the end; and the words that only a measurement
needs: a barrier, the slowest rank's time, rank 0's decision.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from paceline.comm.group import Group
from paceline.comm.process_groups import ProcessGroups, all_gather_json
from paceline.comm.settings import BACKEND_GRACE_S
from paceline.config import RunConfig
from paceline.core.topology import Topology
from paceline.train.machine import choose_device


class RankGroup:
    """A context; every method is called by all ranks alike."""

    def __init__(
        self,
        *,
        backend: str = "auto",
        device: str = "auto",
        group_size: int | None = None,
        timeout_s: float = 300.0,
        share_gpus: bool = False,
    ) -> None:
        self.topology = topology = Topology.from_env(os.environ)
        config = RunConfig().with_values(
            {
                "run.device": device, "comm.backend": backend, "comm.timeout_s": timeout_s,
                "comm.share_gpus": share_gpus,
            }
        )  # fmt: skip
        self.device = choose_device(config, topology)
        self.share_gpus = share_gpus
        self._group_size, self._timeout_s = group_size, timeout_s
        shared = {"program": "bench", "backend": backend, "device": device}
        self.group = Group(topology, config.comm, self.device, shared=shared)
        self._word = torch.zeros(1, dtype=torch.float64, device=self.device)

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.world_size

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds of `work` on this rank, from when all are ready."""
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
        """The largest of all ranks' numbers, on every rank."""
        self._word.fill_(value)
        self._max(self._word)
        return float(self._word)

    def slowest(self, seconds: list[float]) -> list[float]:
        """Of each sample the longest time that a rank took."""
        row = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        self._max(row)
        return [float(value) for value in row]

    def _max(self, row: torch.Tensor) -> None:
        self.group.completed("a barrier", lambda: dist.all_reduce(row, op=dist.ReduceOp.MAX))

    def decided(self, decide: Callable[[], Any]) -> Any:
        """What rank 0 decides, on every rank; plain JSON."""
        data = json.dumps(decide()).encode() if self.rank == 0 else None
        return json.loads(self.group.broadcast_bytes(data))

    def describe(self) -> dict[str, Any]:
        """Facts for a report."""
        return {
            "ranks": self.size, "hosts": len(self.nodes),
            "ranks_per_host": [len(node) for node in self.nodes],
            "backend": self.group.backend, "device": str(self.device),
            "threads": torch.get_num_threads(),
        }  # fmt: skip

    def __enter__(self) -> Self:
        try:
            said: list[int] = []

            def join() -> None:
                self.groups = ProcessGroups(
                    self.topology,
                    self._group_size,
                    timeout_s=self._timeout_s,
                    grace_s=BACKEND_GRACE_S,
                )
                said.extend(all_gather_json(self.topology.node_rank))

            self.group.watched("the making of process groups", join)
        except BaseException:
            self.group.__exit__(*sys.exc_info())
            raise
        numbers = sorted(set(said))
        # The ranks of each host, whatever groups were asked for.
        self.nodes = [[r for r, node in enumerate(said) if node == n] for n in numbers]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.groups.close()
        self.group.__exit__(kind, error, trace)


# Samples of several ways to do one thing, taken in turn.
#
# In: the ways by name. Out: for each the times of the slowest rank, sample by sample. Each round
# takes one sample of every way, beginning with another one each time, so that whatever else the
# machine does hits all of them alike; ratios within one run then mean something.


# With fewer rounds than these a median says nothing, whatever the time limit.
_LEAST_ROUNDS = 3


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
    """`prepare` comes before each sample and `check` after it, outside of its time. Rounds stop
    early where they have taken `limit_s` seconds."""
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
            # All must stop in the same round, so all go by one clock.
            late = ranks.rank == 0 and time.perf_counter() - begun > limit_s
            if ranks.agree_max(float(late)) > 0:
                break
    return {name: ranks.slowest(seconds) for name, seconds in taken.items()}
