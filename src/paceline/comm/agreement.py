"""Agreement between ranks over the rendezvous store, without collectives.

Each rank reports an error, or facts that must be equal on all ranks; either all ranks continue, or all
raise the same error. This works before the first collective and between ranks whose state differs, and
needs neither GPU nor backend. `ActiveClock` measures the waits.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Self

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import Store

from paceline.core.errors import CommError, PacelineError
from paceline.core.topology import Topology

_FAULT = "paceline/fault"
_STOP = "paceline/stop"
_SUSPECT = "paceline/suspect"
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.002, 0.1
_GRACE_S = 15.0


class ActiveClock:
    """Seconds in which this process could run, from 0 on.

    A job that a scheduler or a user suspends as a whole (SIGSTOP, then SIGCONT) must not find all its
    timeouts expired when it continues: between two calls of `now_s` the clock advances by `longest_s`
    at most, so it has to be called more often than that.
    """

    def __init__(self, longest_s: float = 2.0) -> None:
        self._longest_s = longest_s
        self._passed_s = 0.0
        self._before = time.monotonic()
        self._lock = threading.Lock()

    def now_s(self) -> float:
        with self._lock:
            now = time.monotonic()
            self._passed_s += min(now - self._before, self._longest_s)
            self._before = now
            return self._passed_s

    @contextmanager
    def ticking(self) -> Iterator[Self]:
        """Within this context a thread calls `now_s`, for callers that may block for longer."""
        ended = threading.Event()

        def tick() -> None:
            while not ended.wait(self._longest_s / 4):
                self.now_s()

        threading.Thread(target=tick, name="paceline-clock", daemon=True).start()
        try:
            yield self
        finally:
            ended.set()


class AgreedError(PacelineError):
    """An error that all ranks raise; `exit_code` is that of the rank that found it."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class PeerError(CommError):
    """Something failed because another process is gone: a consequence, not a cause."""

    @classmethod
    def from_agreed(cls, cause: AgreedError) -> PeerError:
        """With the message and the exit code of the rank that failed."""
        error = cls(str(cause))
        error.exit_code = cause.exit_code
        return error


class Agreement:
    """Agrees on the phases of a run. Each phase's name is used once in a run; where several runs share
    the group, `run` keeps their phases apart."""

    def __init__(self, store: Store, topology: Topology, timeout_s: float) -> None:
        self._store = store
        self._topology = topology
        self._timeout_s = timeout_s
        self.run = ""

    def agree(
        self,
        phase: str,
        error: PacelineError | None = None,
        facts: Mapping[str, Any] | None = None,
        remedy: str = "start every rank with the same recipe and flags",
    ) -> None:
        """Returns on every rank, or raises the same `AgreedError` on every rank."""
        try:
            verdict = self._verdict(phase, error, facts, remedy)
        except DistNetworkError as lost:
            raise error or PeerError(
                f"rank {self._topology.rank} lost the others at '{phase}': the launcher or rank 0 "
                "has ended",
                "resume with --resume auto",
            ) from lost
        if verdict["error"]:
            raise AgreedError(verdict["error"], verdict["code"])

    def _verdict(
        self,
        phase: str,
        error: PacelineError | None,
        facts: Mapping[str, Any] | None,
        remedy: str,
    ) -> dict[str, Any]:
        """Rank 0's decision about the reports of all ranks, on every rank."""
        mine = {"error": str(error) if error else None, "code": error.exit_code if error else 0}
        self._store.set(
            self._key(phase, self._topology.rank), json.dumps({**mine, "facts": dict(facts or {})})
        )
        if self._topology.is_main:
            verdict = self._decide(phase, remedy)
            self._store.set(self._key(phase, "verdict"), json.dumps(verdict))
            return verdict
        found: dict[str, Any] = json.loads(self._wait(phase, "verdict"))
        return found

    def _decide(self, phase: str, remedy: str) -> dict[str, Any]:
        """On rank 0: the first error, else the first difference, is the verdict."""
        reports = []
        for rank in range(self._topology.world_size):
            try:
                reports.append(json.loads(self._wait(phase, rank)))
            except (CommError, AgreedError) as error:
                return {"error": str(error), "code": error.exit_code}
        for rank, report in enumerate(reports):
            if report["error"]:
                where = f"rank {rank}: " if self._topology.world_size > 1 else ""
                return {"error": where + report["error"], "code": report["code"]}
        for rank, report in enumerate(reports):
            for name in sorted(reports[0]["facts"].keys() | report["facts"].keys()):
                ours, theirs = reports[0]["facts"].get(name), report["facts"].get(name)
                if ours != theirs:
                    text = f"ranks differ in {name}: {ours!r} on rank 0, {theirs!r} on rank {rank}"
                    return {"error": f"{text}; {remedy}", "code": 2}
        return {"error": None, "code": 0}

    def _key(self, phase: str, who: int | str) -> str:
        return f"paceline/{self.run}{phase}/{who}"

    def _wait(self, phase: str, who: int | str) -> bytes:
        """The report of `who`; raises early where a rank has posted that it failed."""
        key, pause_s = self._key(phase, who), _FIRST_PAUSE_S
        # Rank 0 gives up first: it knows who is missing, and its verdict names that rank.
        patience_s = self._timeout_s + (_GRACE_S if who == "verdict" else 0.0)
        clock = ActiveClock()
        while not self._store.check([key]):
            fault = self.read_fault()
            # Rank 0 may have failed right after its decision: then the verdict is there by now.
            if fault is not None and not self._store.check([key]):
                raise fault
            if clock.now_s() > patience_s:
                missing = "rank 0" if who == "verdict" else f"rank {who}"
                raise CommError(
                    f"{missing} did not reach '{phase}' within {self._timeout_s:g} s",
                    f"look into the log of {missing}; comm.rendezvous_timeout_s sets the wait",
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        return bytes(self._store.get(key))

    def post_fault(self, error: PacelineError) -> None:
        """Publishes this rank's error; the first one published stays."""
        report = json.dumps(
            {"rank": self._topology.rank, "error": str(error), "code": error.exit_code}
        )
        # Where the store is gone with its host no rank can read it, and the error itself counts.
        with suppress(RuntimeError):
            self._store.compare_set(_FAULT, "", report)

    def read_fault(self, wait_s: float = 0.0) -> AgreedError | None:
        """The error that some rank published, if any; waits up to `wait_s` for one."""
        try:
            if wait_s > 0:
                self._store.wait([_FAULT], timedelta(seconds=wait_s))
            elif not self._store.check([_FAULT]):
                return None
            report = json.loads(self._store.get(_FAULT))
        except RuntimeError:  # nothing came, or the store went away with its host
            return None
        where = f"rank {report['rank']}: " if self._topology.world_size > 1 else ""
        return AgreedError(where + report["error"], report["code"])

    def first_suspect(self, suspect: str) -> str:
        """Who is gone according to the first rank whose connection broke. Ranks that leave next break
        other connections in turn, and would be blamed for it."""
        try:
            return bytes(self._store.compare_set(_SUSPECT, "", suspect)).decode() or suspect
        except RuntimeError:
            return suspect

    def known_suspect(self) -> str:
        """What another rank has found already, or an empty string."""
        try:
            if self._store.check([_SUSPECT]):
                return bytes(self._store.get(_SUSPECT)).decode()
        except RuntimeError:
            pass
        return ""

    def announce_stop(self) -> None:
        """Tells ranks that received no signal, before the next collective, that one did."""
        with suppress(RuntimeError):
            self._store.set(_STOP, "")

    def stop_announced(self) -> bool:
        try:
            return bool(self._store.check([_STOP]))
        except RuntimeError:
            return False

    def leave(self, wait_s: float) -> None:
        """Marks that this rank needs the store no more; rank 0, where it hosts the store, waits for the
        others. Else the store would be gone before a slower rank has read why all ranks end."""
        ranks = range(self._topology.world_size)
        with suppress(RuntimeError):
            self._store.set(self._key("left", self._topology.rank), "")
            if self._topology.is_main and self._topology.launcher != "torchrun":
                keys = [self._key("left", rank) for rank in ranks]
                self._store.wait(keys, timedelta(seconds=wait_s))
