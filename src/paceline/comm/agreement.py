"""Agreement between ranks over the rendezvous store, without collectives.

Each rank reports an error, or facts that must be equal on all ranks; either all ranks continue, or all
raise the same error. This works before the first collective and between ranks whose state differs, and
needs neither GPU nor backend. `ActiveClock` measures the waits.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, Self

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import Store

from paceline.comm.job import Attendance, RankHosts
from paceline.comm.peer_errors import (
    SAME_SETTINGS,
    AgreedError,
    PeerError,
    Remedies,
    error_kind,
)
from paceline.core.errors import CommError, PacelineError
from paceline.core.topology import Topology
from paceline.core.untrusted import ParseError, is_count, parse_table

_FAULT = "paceline/fault"
_STOP = "paceline/stop"
_NEWS = "paceline/news"
_SUSPECT = "paceline/suspect"
_LEFT = "paceline/left"
_ROLL = "paceline/roll"
# Torch may log a wait that ends without its key, so waits are long. What ends one early, a fault or a
# lost rank 0, wakes it.
_SLICE_S = 30.0
# Rank 0 alone polls, because it has to give up in time.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.01
_GRACE_S = 15.0
_LONGEST_TEXT = 100_000
# How long the store's host stays for ranks that may still have to read; longer than they wait.
_LEAVE_WAIT_S = 3.0
# No value is this text: to compare a key with it only reads the key.
_NOTHING = "none"


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


def came(store: Store, key: str, wait_s: float) -> bool:
    """Waits for a key; False where it is not there by then."""
    try:
        store.wait([key], timedelta(seconds=wait_s))
    except DistNetworkError:
        raise
    except RuntimeError:  # the time is over
        return bool(store.check([key]))
    return True


def peek(store: Store, key: str) -> str:
    """The value of a key, empty where it is not there. One request; torch's `get` makes two."""
    found = store.compare_set(key, _NOTHING, "").decode(errors="replace")
    return "" if found == _NOTHING else found


def _as_report(error: PacelineError) -> dict[str, Any]:
    return {"error": str(error), "code": error.exit_code, "kind": error_kind(error)}


class Report(NamedTuple):
    """What a rank, or the rank that decides, has found: an error, or the digest of other facts."""

    rank: int = 0
    error: str = ""
    code: int = 0
    kind: str = ""
    digest: str = ""

    @classmethod
    def parse(cls, text: bytes | str) -> Report:
        """Raises ParseError for a text that no rank has written."""
        table = parse_table(text)
        found = cls(**{name: table[name] for name in cls._fields if name in table})
        texts = (found.error, found.kind, found.digest)
        if (
            not table.keys() & {"error", "digest"}
            or not all(isinstance(part, str) and len(part) <= _LONGEST_TEXT for part in texts)
            or not is_count(found.rank, 0, 1 << 20)
            or not is_count(found.code, 0, 255)
            or (found.error and not found.code)
        ):
            raise ParseError("is no report")
        return found


def _text(value: bytes) -> str:
    return bytes(value).decode(errors="replace")[:_LONGEST_TEXT]


def _digest_and_rank(value: str) -> list[str]:
    found = value[:_LONGEST_TEXT].split()
    if len(found) != 2 or not found[1].isdecimal():
        raise ParseError("is no digest")
    return found


@contextmanager
def explain_lost_store(rank: int, phase: str, error: PacelineError | None = None) -> Iterator[None]:
    """Raises `error`, or a PeerError, where the store is gone with the process that served it, or
    where it holds what no rank has written."""
    try:
        yield
    except ParseError as strange:
        raise error or PeerError(
            f"rank {rank} has read a message at '{phase}' that no rank has written ({strange})",
            "let only the ranks of the job reach MASTER_PORT",
        ) from strange
    except DistNetworkError as lost:
        raise error or PeerError(
            f"rank {rank} lost the others at '{phase}': the launcher or rank 0 has ended",
            "resume with --resume auto",
        ) from lost


class Agreement:
    """Agrees on the phases of a run, which all ranks reach in the same order. Where several runs share
    the group, `run` keeps their phases apart.

    In a phase in which all is well each rank makes three requests to the store, four where it compares
    facts: it counts itself (`Attendance`) and waits for the verdict. The last rank to arrive writes the
    verdict, and is the only one to look for reports; these come from ranks that failed or differ.
    """

    def __init__(self, store: Store, topology: Topology, timeout_s: float) -> None:
        self._store = store
        self._topology = topology
        self._timeout_s = timeout_s
        self.run = ""
        self._number = 0
        self._left = False

    def agree(
        self,
        phase: str,
        error: PacelineError | None = None,
        facts: Mapping[str, Any] | None = None,
        remedy: Remedies = SAME_SETTINGS,
    ) -> None:
        """Returns on every rank, or raises the same `AgreedError` on every rank. `remedy` is one for all
        facts, or one for each by name."""
        with explain_lost_store(self._topology.rank, phase, error):
            verdict = self._verdict(phase, error, facts, remedy)
        if verdict.error:
            raise AgreedError.of_kind(verdict.kind, verdict.error, verdict.code)

    def _verdict(
        self,
        phase: str,
        error: PacelineError | None,
        facts: Mapping[str, Any] | None,
        remedy: Remedies,
    ) -> Report:
        """The one verdict about the reports of all ranks, on every rank."""
        self._number += 1
        base, rank = f"paceline/agree/{self.run}{self._number}/{phase}", self._topology.rank
        report: dict[str, Any] | None = None
        if error is not None:
            report = {"rank": rank, **_as_report(error)}
        elif facts is not None and (digest := self._differs(base, facts)):
            report = {"rank": rank, "digest": digest}
        if report is not None:
            self._store.append(f"{base}/reports", json.dumps(report) + "\n")  # type: ignore[attr-defined]
        attendance = Attendance(self._store, base, self._topology.world_size)
        if attendance.arrive(rank):
            self._publish_verdict(self._number, self._decide(base, remedy))
        return self._await_verdict(base, phase, attendance, remedy)

    def _differs(self, base: str, facts: Mapping[str, Any]) -> str:
        """The digest of these facts where another rank has published other ones first, else "". The
        facts themselves are in the store for rank 0, the first rank, and those that differ."""
        text, rank = json.dumps(dict(facts)), self._topology.rank
        in_order = json.dumps(dict(facts), sort_keys=True)
        digest = hashlib.sha256(in_order.encode()).hexdigest()[:16]
        published = self._store.compare_set(f"{base}/facts", "", f"{digest} {rank}")
        first = _digest_and_rank(_text(published))
        if rank == 0 or first == [digest, str(rank)] or first[0] != digest:
            self._store.set(f"{base}/facts/{rank}", text)
        return "" if first[0] == digest else digest

    def _publish_verdict(self, number: int, verdict: Mapping[str, Any]) -> str:
        """The first verdict stays: rank 0 may give up while the last rank arrives."""
        key = f"paceline/verdict/{number}"
        return self._store.compare_set(key, "", json.dumps(verdict)).decode()

    def _decide(self, base: str, remedy: Remedies) -> dict[str, Any]:
        """With all reports there: the error of the lowest rank, else the first difference."""
        if not self._store.check([f"{base}/reports"]):
            return {"error": "", "code": 0}
        reports = []
        for line in self._store.get(f"{base}/reports").splitlines():
            with suppress(ParseError):
                reports.append(Report.parse(line))
        failed = [report for report in reports if report.error]
        if failed:
            first = min(failed, key=lambda report: report.rank)
            where = f"rank {first.rank}: " if self._topology.world_size > 1 else ""
            return {"error": where + first.error, "code": first.code, "kind": first.kind}
        if not any(report.digest for report in reports):
            return {"error": "", "code": 0}
        common, holder = _digest_and_rank(peek(self._store, f"{base}/facts"))
        digests = {report.rank: report.digest for report in reports}
        expected = digests.get(0, common)
        ranks = range(1, self._topology.world_size)
        rank = next((rank for rank in ranks if digests.get(rank, common) != expected), 0)
        ours = parse_table(peek(self._store, f"{base}/facts/0"))
        theirs = parse_table(
            peek(self._store, f"{base}/facts/{rank if rank in digests else holder}")
        )
        # The first in the order in which the phase compares them: later ones may follow from it.
        name = next((n for n in (ours | theirs) if ours.get(n) != theirs.get(n)), None)
        if name is None:
            raise ParseError("is no difference")
        text = (
            f"ranks differ in {name}: {ours.get(name)!r} on rank 0, {theirs.get(name)!r} on rank "
            f"{rank}"
        )
        given = remedy if isinstance(remedy, str) else remedy.get(name, SAME_SETTINGS)
        return {"error": f"{text}; {given}", "code": 2}

    def _await_verdict(
        self, base: str, phase: str, attendance: Attendance, remedy: Remedies
    ) -> Report:
        """Returns early where a rank fails instead of arriving (`post_fault`)."""
        key = f"paceline/verdict/{self._number}"
        # Rank 0 gives up first: its verdict names who is missing.
        if self._topology.is_main:
            if not self._polled(key):
                missing = attendance.missing()
                late = self._late(missing, phase) if missing else self._decide(base, remedy)
                self._publish_verdict(self._number, late)
        else:
            self._await_key(key, phase)
        return Report.parse(peek(self._store, key))

    def _polled(self, key: str) -> bool:
        clock, pause_s = ActiveClock(), _FIRST_PAUSE_S
        while not self._store.check([key]):
            if clock.now_s() > self._timeout_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        return True

    def _await_key(self, key: str, phase: str) -> None:
        patience_s = self._timeout_s + _GRACE_S
        clock = ActiveClock(longest_s=2 * _SLICE_S)
        while not came(self._store, key, min(_SLICE_S, patience_s)):
            fault = self.read_fault()
            # A rank may have failed right after the decision: then the verdict is there by now.
            if fault is not None and not self._store.check([key]):
                raise fault
            if clock.now_s() > patience_s:
                raise CommError(
                    f"rank 0 did not reach '{phase}' within {self._timeout_s:g} s",
                    "look into the log of rank 0; comm.rendezvous_timeout_s sets the wait",
                )

    def _late(self, missing: Sequence[int], phase: str) -> dict[str, Any]:
        hosts = RankHosts.read(self._store) if RankHosts.posted(self._store) else RankHosts()
        error = CommError(
            f"{hosts.describe(missing)} did not reach '{phase}' within {self._timeout_s:g} s",
            f"look into the log of rank {missing[0]}; comm.rendezvous_timeout_s sets the wait",
        )
        return {"error": str(error), "code": error.exit_code}

    def post(self, name: str, text: str) -> None:
        """For `read` on ranks that have passed a later phase; no other text under this name in this
        run."""
        with suppress(RuntimeError):  # the store is gone with its host: the next phase says so
            self._store.set(f"paceline/post/{self.run}{name}", text)

    def read(self, name: str) -> str:
        """Empty where nothing was posted."""
        try:
            return peek(self._store, f"paceline/post/{self.run}{name}")
        except RuntimeError:
            return ""

    def post_fault(self, error: PacelineError) -> None:
        """Publishes this rank's error; the first one published stays. It becomes the verdict of the next
        phase too, for the ranks that wait in it for this one."""
        report = json.dumps({"rank": self._topology.rank, **_as_report(error)})
        # Where the store is gone with its host no rank can read it, and the error itself counts.
        with suppress(RuntimeError, ParseError):
            first = self._agreed(self._store.compare_set(_FAULT, "", report))
            verdict = _as_report(first)
            self._publish_verdict(self._number + 1, verdict)

    def _agreed(self, text: bytes) -> AgreedError:
        report = Report.parse(text)
        where = f"rank {report.rank}: " if self._topology.world_size > 1 else ""
        return AgreedError.of_kind(report.kind, where + report.error, report.code)

    def read_fault(self, wait_s: float = 0.0) -> AgreedError | None:
        """The error that some rank published, if any; waits up to `wait_s` for one."""
        try:
            if wait_s > 0:
                self._store.wait([_FAULT], timedelta(seconds=wait_s))
            elif not self._store.check([_FAULT]):
                return None
            return self._agreed(self._store.get(_FAULT))
        except (RuntimeError, ParseError):  # nothing came, or the store went away with its host
            return None

    def first_suspect(self, suspect: str) -> str:
        """Who is gone according to the first rank whose connection broke. Ranks that leave next break
        other connections in turn, and would be blamed for it."""
        try:
            return _text(self._store.compare_set(_SUSPECT, "", suspect)) or suspect
        except RuntimeError:
            return suspect

    def known_suspect(self) -> str:
        """What another rank has found already, or an empty string."""
        try:
            if self._store.check([_SUSPECT]):
                return _text(self._store.get(_SUSPECT))
        except RuntimeError:
            pass
        return ""

    def call_roll(self) -> None:
        """Asks every rank to show that it is alive (`answer_roll`)."""
        self._store.set(_ROLL, "")
        self.post_news()

    def roll_is_called(self) -> bool:
        return bool(self._store.check([_ROLL]))

    def answer_roll(self) -> None:
        """Once."""
        Attendance(self._store, _ROLL, self._topology.world_size).arrive(self._topology.rank)

    def missing_in_roll(self) -> set[int]:
        """Ranks that have neither answered nor left the job by themselves."""
        missing = set(Attendance(self._store, _ROLL, self._topology.world_size).missing())
        if missing:
            left = Attendance(self._store, _LEFT, self._topology.world_size)
            missing &= set(left.missing())
        return missing

    def announce_stop(self) -> None:
        """Tells ranks that received no signal, before the next collective, that one did."""
        with suppress(RuntimeError):
            self._store.set(_STOP, "")
            self.post_news()

    def stop_announced(self) -> bool:
        return bool(self._store.check([_STOP]))

    def post_news(self) -> None:
        """There is something that every rank must look for."""
        self._store.set(_NEWS, "")

    def has_news(self) -> bool:
        return bool(self._store.check([_NEWS]))

    def leave(self, wait_s: float = _LEAVE_WAIT_S) -> None:
        """Marks that this rank needs the store no more; rank 0, where it hosts the store, waits for the
        others. Else the store would be gone before a slower rank has read why all ranks end."""
        if self._left:
            return
        self._left = True
        with suppress(RuntimeError):
            attendance = Attendance(self._store, _LEFT, self._topology.world_size)
            if attendance.arrive(self._topology.rank):
                self._store.set(f"{_LEFT}/all", "")
            if self._topology.is_main and self._topology.launcher != "torchrun":
                self._store.wait([f"{_LEFT}/all"], timedelta(seconds=wait_s))

    def left(self) -> set[int]:
        """Ranks that have left."""
        size = self._topology.world_size
        return set(range(size)) - set(Attendance(self._store, _LEFT, size).missing())

    def have_left(self, ranks: Collection[int]) -> bool:
        left = Attendance(self._store, _LEFT, self._topology.world_size)
        return set(left.missing()).isdisjoint(ranks)
