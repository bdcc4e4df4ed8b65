"""A job of many ranks without a model: forked processes that meet, agree and stall like a training.

For each rank of a `Scenario` the result has its measurements, or the line with which it ended. All
ranks run on this machine but behave as on nodes of `per_node` ranks. They start together, once all are
forked, so the forks are not measured.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  (the first look-up would import it in every fork)
import gc
import json
import os
import select
import signal
import socket
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.comm import rendezvous
from paceline.comm.agreement import Agreement
from paceline.comm.job import RankHosts
from paceline.comm.progress import ProgressBoard
from paceline.comm.rendezvous import meet
from paceline.comm.watchdog import Watchdog
from paceline.config import RunConfig
from paceline.core.errors import DataError, PacelineError
from paceline.core.topology import Topology
from paceline.planner.start_up import PHASES
from ranks import free_port

KINDS = (
    "healthy", "fault", "differs", "missing rank", "missing node", "dies meeting", "dies", "late",
    "stall", "dead", "twice",
)  # fmt: skip
# As all ranks of a training present them when they meet.
_SETTINGS = RunConfig().flat()
_ATTEMPTS_S = 600.0
# A rank that has its line stays for others that still need the cores, as it would have its own.
_STAY_S = 15.0


@dataclass(frozen=True)
class Scenario:
    """A job.

    Attributes:
        kind: What happens in it.
        ranks: Number of ranks.
        per_node: Ranks of a node. Kinds that concern a node concern the second one.
        timeout_s: Time limit of the rendezvous and of the exchange.
        odd: The rank that fails.
        phase: The phase before which a rank dies, 0 for the first.
    """

    kind: str
    ranks: int
    per_node: int = 8
    timeout_s: float = 60.0
    odd: int = 5
    phase: int = 0

    @property
    def silent(self) -> int:
        """Returns the number of ranks that write no line."""
        return int(self.kind in ("dead", "dies", "dies meeting", "late"))

    @property
    def next_phase(self) -> str:
        return f"phase {self.phase - 1}" if self.phase else "join"

    @property
    def second_node(self) -> range:
        return range(self.per_node, 2 * self.per_node)

    @property
    def absent(self) -> set[int]:
        """Returns the ranks that are never started."""
        if self.kind == "missing rank":
            return {self.odd}
        if self.kind == "missing node":
            return set(self.second_node)
        return set()

    @property
    def started(self) -> list[int]:
        ranks = sorted(set(range(self.ranks)) - self.absent)
        return [*ranks, self.odd] if self.kind == "twice" else ranks


@dataclass(frozen=True)
class RankResult:
    """Seconds since all ranks started together. `line` is the error with which the rank ended."""

    rank: int
    met_s: float = 0.0
    phases_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    line: str = ""
    # Of the fault, on the rank that made it.
    failed_s: float = 0.0
    # CPU time of the process until it had met, and in all; rank 0's has the store's thread in it.
    met_cpu_s: float = 0.0
    cpu_s: float = 0.0


def run(scenario: Scenario, limit_s: float = 300.0) -> list[RankResult]:
    """Returns the results of all started ranks, in order.

    A rank that writes nothing within `limit_s` is killed and has no result.
    """
    gc.collect()
    gc.freeze()
    port, children = free_port(), list[int]()
    reader, writer = os.pipe()
    stays, ends = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        for rank in scenario.started:
            child = os.fork()
            if child == 0:
                os.close(writer)
                os.close(ends)
                os.read(reader, 1)  # until the parent has forked all
                _Rank(scenario, rank, port, results, stays).main()
            children.append(child)
        os.close(writer)
        os.close(reader)
        os.close(stays)
        _await_lines(results, len(children) - scenario.silent)
        os.close(ends)
        _reap(children, limit_s)
        lines = results.read_text().splitlines() if results.exists() else []
    return sorted((RankResult(**json.loads(line)) for line in lines), key=lambda r: r.rank)


def _await_lines(results: Path, count: int) -> None:
    """Waits until all ranks have written, or for as long as one stays."""
    deadline, started = 0.0, time.monotonic()
    while time.monotonic() < (deadline or started + _ATTEMPTS_S):
        written = results.read_bytes().count(b"\n") if results.exists() else 0
        if written >= count:
            return
        if written and not deadline:
            deadline = time.monotonic() + _STAY_S
        time.sleep(0.1)


def _reap(children: list[int], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    left = set(children)
    while left:
        for child in list(left):
            if os.waitpid(child, os.WNOHANG)[0]:
                left.discard(child)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


class _Rank:
    """One forked process; `main` does not return."""

    def __init__(self, scenario: Scenario, rank: int, port: int, results: Path, stays: int) -> None:
        self._scenario, self._results, self._stays = scenario, results, stays
        self._started = self._cpu_s = 0.0
        self._met_cpu_s = 0.0
        per_node = min(scenario.per_node, scenario.ranks)
        node, local = divmod(rank, per_node)
        self._rank = rank
        self._topology = Topology(
            rank, scenario.ranks, local, per_node, node, "127.0.0.1", port, launcher="environment"
        )
        self._met_s = self._failed_s = self._knows_s = 0.0
        self._phases_s: list[float] = []

    def main(self) -> None:
        self._started, self._cpu_s = time.monotonic(), time.process_time()
        socket.gethostname = lambda: f"node{self._topology.node_rank}"
        line = ""
        try:
            self._run()
        except PacelineError as error:
            line = str(error)
        except BaseException as error:  # a fork must not return to its caller
            line = f"unexpected: {error!r}"
        self._report(line)
        select.select([self._stays], [], [], _STAY_S)
        os._exit(0)

    def _since_s(self) -> float:
        return time.monotonic() - self._started

    def _report(self, line: str) -> None:
        ended_s = self._knows_s or self._since_s()
        cpu_s = time.process_time() - self._cpu_s
        result = RankResult(
            self._rank, self._met_s, self._phases_s, ended_s, line, self._failed_s,
            self._met_cpu_s, cpu_s,
        )  # fmt: skip
        with self._results.open("a") as file:  # one write a line: they do not mix
            file.write(json.dumps(asdict(result)) + "\n")

    def _run(self) -> None:
        kind, timeout_s = self._scenario.kind, self._scenario.timeout_s
        is_odd = self._rank == self._scenario.odd
        short = kind in ("missing rank", "missing node", "dies meeting", "dies", "late")
        long_s = timeout_s if short else _ATTEMPTS_S
        if is_odd and kind == "dies meeting":
            rendezvous.take_place = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        # Who dies or is late after the meeting has met the others, however busy the host is.
        meets_s = _ATTEMPTS_S if kind in ("dies", "late") else long_s
        store = meet(self._topology, meets_s, _SETTINGS).store
        self._met_s, self._met_cpu_s = self._since_s(), time.process_time() - self._cpu_s
        agreement = Agreement(store, self._topology, long_s)
        try:
            self._die_before(0)
            differs = kind == "differs" and self._rank in self._scenario.second_node
            version = "2.12" if differs else "2.13"
            agreement.agree("join", facts={"torch": version}, remedy="install the same everywhere")
            if is_odd and kind == "late":
                time.sleep(timeout_s + 5)
                os._exit(0)
            if is_odd and kind == "fault":
                time.sleep(1)
                self._failed_s = self._since_s()
                raise DataError("no images", "check data.dir")
            if kind in ("stall", "dead"):
                self._stall(store, agreement, is_odd)
            for phase in range(PHASES - 1):
                self._die_before(phase + 1)
                begun = time.monotonic()
                facts = {"seed": 1} if phase % 3 == 0 else None
                agreement.agree(f"phase {phase}", facts=facts)
                self._phases_s.append(time.monotonic() - begun)
        except PacelineError as error:
            if isinstance(error, DataError):
                agreement.post_fault(error)
            self._knows_s = self._since_s()
            raise
        finally:
            agreement.leave(2.0 + self._scenario.ranks / 100)

    def _die_before(self, phase: int) -> None:
        scenario = self._scenario
        if scenario.kind == "dies" and self._rank == scenario.odd and phase == scenario.phase:
            os.kill(os.getpid(), signal.SIGKILL)

    def _stall(self, store: Any, agreement: Agreement, is_odd: bool) -> None:
        """Stalls until the watchdog ends this process."""
        board = ProgressBoard()
        watchdog = Watchdog(
            store, self._topology, self._scenario.timeout_s, board,
            lambda error: self._report(str(error)), RankHosts.read(store),
        )  # fmt: skip
        agreement.agree("watched")
        self._started = time.monotonic()
        if is_odd and self._scenario.kind == "dead":
            with contextlib.suppress(ProcessLookupError):
                os.kill(os.getpid(), signal.SIGKILL)
        if not is_odd:
            with board.during("all-reduce"):
                time.sleep(_ATTEMPTS_S)
        time.sleep(_ATTEMPTS_S)
        watchdog.close()


def start_up_s(results: list[RankResult]) -> tuple[float, float, float]:
    """Returns when the last rank has met, the median phase, and when the last rank has ended."""
    phases = [phase_s for result in results for phase_s in result.phases_s]
    return (
        max(result.met_s for result in results),
        statistics.median(phases) if phases else 0.0,
        max(result.ended_s for result in results),
    )
