"""Makes ranks agree on success or failure, through the rendezvous store and without collectives.

A rank that failed reports its error; a rank can also report values (facts) that must be equal on all
ranks. Then all ranks continue, or all raise the same error. An agreement needs neither a GPU nor a
backend. So it works before the first collective, and also between ranks whose state differs.
`ActiveClock` measures how long a rank waits.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
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
_LEFT = "paceline/left"
_ROLL = "paceline/roll"
# Length of one wait for a key. Torch may log a wait that ends before the key exists, so waits are long.
_SLICE_S = 30.0
# Only rank 0 polls for the verdict, because rank 0 must give up exactly after the timeout.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.01
_GRACE_S = 15.0
_LONGEST_TEXT = 100_000
_MOST_RANKS = 1 << 20
# How long rank 0, if it hosts the store, waits for ranks that still have to read from the store.
_LEAVE_WAIT_S = 3.0
# No key has this value, so `compare_set` with this text as the expected value only reads the key.
_NOTHING = "none"


class ActiveClock:
    """Counts the seconds in which this process could run.

    A scheduler or a user may suspend a whole job (SIGSTOP, then SIGCONT). The timeouts of the job must
    not have expired when the job continues. So the clock advances by at most `longest_s` between two
    calls of `now_s`. Callers must call `now_s` at shorter intervals than `longest_s`.
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
        """Calls `now_s` regularly from a thread, for callers that may block longer than `longest_s`."""
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
    """Waits up to `wait_s` seconds until `key` exists in the store. Returns True if it exists."""
    try:
        store.wait([key], timedelta(seconds=wait_s))
    except DistNetworkError:
        raise
    except RuntimeError:  # `wait_s` has passed
        return bool(store.check([key]))
    return True


def peek(store: Store, key: str) -> str:
    """Returns the value of `key` in the store, or "" if the key does not exist.

    This sends one request to the store; torch's `get` sends two.
    """
    value = store.compare_set(key, _NOTHING, "").decode(errors="replace")
    return "" if value == _NOTHING else value


class Report(NamedTuple):
    """A message in the store: the error of one rank, or the common result of all ranks.

    The common result (the verdict of `Agreement.agree`) is the error that all ranks raise, or no
    error.
    """

    rank: int = 0
    error: str = ""
    code: int = 0
    kind: str = ""
    # True if the error is that this rank's facts differ from the facts of another rank.
    is_difference: bool = False

    @classmethod
    def of(cls, rank: int, error: PacelineError) -> Report:
        return cls(rank, str(error), error.exit_code, error_kind(error))

    @classmethod
    def parse(cls, text: bytes | str) -> Report:
        """Parses the text of a report. Raises ParseError if no rank can have written the text."""
        table = parse_table(text)
        report = cls(**{name: table[name] for name in cls._fields if name in table})
        if (
            "error" not in table
            or not all(
                isinstance(part, str) and len(part) <= _LONGEST_TEXT
                for part in (report.error, report.kind)
            )
            or not is_count(report.rank, 0, _MOST_RANKS)
            or not is_count(report.code, 0, 255)
            or (report.error and not report.code)
        ):
            raise ParseError("is no report")
        return report

    def to_text(self) -> str:
        return json.dumps(self._asdict())

    def as_error(self, ranks: int) -> AgreedError:
        """Returns the error that all ranks raise. The text names the failed rank if `ranks` > 1."""
        where = f"rank {self.rank}: " if ranks > 1 and not self.is_difference else ""
        return AgreedError.of_kind(self.kind, where + self.error, self.code)


@contextmanager
def explain_lost_store(rank: int, phase: str, error: PacelineError | None = None) -> Iterator[None]:
    """Replaces errors of the store that the block raises by `error`, or by a PeerError if it is None."""
    try:
        yield
    except ParseError as strange:
        raise error or PeerError(
            f"rank {rank} has read an invalid message in the rendezvous store at '{phase}' ({strange})",
            "make sure that only the ranks of the job can reach MASTER_PORT",
        ) from strange
    except DistNetworkError as lost:
        raise error or PeerError(
            f"rank {rank} lost the other ranks at '{phase}': the launcher or rank 0 has ended",
            "resume with --resume auto",
        ) from lost


class Agreement:
    """Makes all ranks continue, or raise the same error, at the end of each phase of a run.

    A phase is a named part of a run in which a rank can fail alone, such as opening the data.

    All ranks reach the phases in the same order. If several runs share the group, the prefix `run`
    distinguishes their phases. At the end of a phase each rank records its arrival (`Attendance`) and
    waits for the verdict: the error that all ranks raise, or no error. A rank that failed, or whose
    facts differ from those of other ranks, first posts a report. Only the last rank to arrive reads
    the reports; it writes the verdict. If there is no error, a phase takes three requests to the store
    per rank, or four if facts are compared.
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
        """Returns on every rank if no rank failed; otherwise raises the same error on every rank.

        Args:
            phase: The name of the phase, for messages.
            error: The error of this rank, if it failed.
            facts: Values that must be equal on all ranks. JSON must be able to represent them.
            remedy: What the user can do if facts differ: one text for all facts, or one text per
                fact name.

        Raises:
            AgreedError: If a rank failed, has different facts or did not arrive in time.
            PeerError: If the process that hosts the store has ended.
        """
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
        self._number += 1
        base, rank = f"paceline/agree/{self.run}{self._number}/{phase}", self._topology.rank
        report = None if error is None else Report.of(rank, error)
        if report is None and facts is not None:
            report = self._compare(f"{base}/facts", facts, remedy)
        if report is not None:
            self._store.append(f"{base}/reports", report.to_text() + "\n")  # type: ignore[attr-defined]
        attendance = Attendance(self._store, base, self._topology.world_size)
        if attendance.arrive(rank):
            self._publish_verdict(self._number, self._decide(base))
        return self._await_verdict(base, phase, attendance)

    def _compare(self, key: str, facts: Mapping[str, Any], remedy: Remedies) -> Report | None:
        """Compares this rank's values `facts` with those of the first rank that arrived.

        Returns:
            A report on the first fact that differs, or None if all facts are equal.
        """
        rank, own = self._topology.rank, json.loads(json.dumps(dict(facts)))
        published = self._store.compare_set(key, "", json.dumps({"rank": rank, "facts": own}))
        table = parse_table(published)
        peer, theirs = table.get("rank"), table.get("facts")
        if not is_count(peer, 0, _MOST_RANKS) or not isinstance(theirs, dict):
            raise ParseError("is no list of facts")
        # The first fact that differs, in the order of the dict: later differences may follow from the
        # first one. Values are compared as text, because NaN is not equal to itself.
        text = partial(json.dumps, sort_keys=True)
        name = next((n for n in (own | theirs) if text(own.get(n)) != text(theirs.get(n))), None)
        if name is None:
            return None
        values = sorted([(rank, own.get(name)), (peer, theirs.get(name))], key=lambda pair: pair[0])
        shown = ", ".join(f"{value!r} on rank {holder}" for holder, value in values)
        advice = remedy if isinstance(remedy, str) else remedy.get(name, SAME_SETTINGS)
        error = f"ranks differ in {name}: {shown}; {advice}"
        return Report(rank, error, 2, is_difference=True)

    def _publish_verdict(self, number: int, verdict: Report) -> None:
        """Publishes the result of a phase, unless it has one, because two ranks may do this."""
        self._store.compare_set(f"paceline/verdict/{number}", "", verdict.to_text())

    def _decide(self, base: str) -> Report:
        """Returns the error that all ranks raise at the end of a phase, or a report without an error.

        This is the error of the lowest rank that failed. If no rank failed, it is the difference
        between ranks' facts that the lowest rank reported, if any.
        """
        if not self._store.check([f"{base}/reports"]):
            return Report()
        reports = []
        for line in self._store.get(f"{base}/reports").splitlines():
            with suppress(ParseError):
                reports.append(Report.parse(line))
        failed = [report for report in reports if not report.is_difference]
        first = min(failed or reports, key=lambda report: report.rank, default=None)
        if first is None:
            raise ParseError("is no report")
        error = first.as_error(self._topology.world_size)
        return Report(first.rank, str(error), first.code, first.kind)

    def _await_verdict(self, base: str, phase: str, attendance: Attendance) -> Report:
        """Waits for the result of a phase and returns it; stops waiting if a rank posts a fault."""
        key = f"paceline/verdict/{self._number}"
        # Rank 0 gives up first and publishes a verdict that names the missing ranks.
        if self._topology.is_main:
            if not self._polled(key):
                missing = attendance.missing()
                late = self._late(missing, phase) if missing else self._decide(base)
                self._publish_verdict(self._number, late)
        else:
            self._await_key(key, phase)
        return Report.parse(peek(self._store, key))

    def _polled(self, key: str) -> bool:
        """Waits until `key` exists. Returns False if it does not exist after the timeout."""
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
            # A rank may fail right after it has written the verdict: then the verdict counts.
            if fault is not None and not self._store.check([key]):
                raise fault
            if clock.now_s() > patience_s:
                raise CommError(
                    f"rank 0 did not reach '{phase}' within {self._timeout_s:g} s",
                    "look into the log of rank 0; comm.rendezvous_timeout_s sets the wait",
                )

    def _late(self, missing: Sequence[int], phase: str) -> Report:
        hosts = RankHosts.read(self._store) if RankHosts.posted(self._store) else RankHosts()
        error = CommError(
            f"{hosts.describe(missing)} did not reach '{phase}' within {self._timeout_s:g} s",
            f"look into the log of rank {missing[0]}; comm.rendezvous_timeout_s sets the wait",
        )
        return Report.of(0, error)

    def post_fault(self, error: PacelineError) -> None:
        """Publishes this rank's error unless another rank has already published one.

        The error also becomes the verdict of the next phase, so that ranks that wait at the end of
        that phase raise it.
        """
        report = Report.of(self._topology.rank, error)
        # If the store has ended with its host, no rank can read the error. The caller then raises it.
        with suppress(RuntimeError, ParseError):
            first = self._agreed(self._store.compare_set(_FAULT, "", report.to_text()))
            self._publish_verdict(self._number + 1, Report.of(report.rank, first))

    def interrupt(self, error: PacelineError) -> None:
        """Makes all ranks raise `error` at the end of the current phase and of the next one.

        Another thread may call this, on a separate connection, while this rank waits at the end of a
        phase.
        """
        verdict = Report.of(self._topology.rank, error).to_text()
        with suppress(RuntimeError):
            store: Store = self._store.clone()  # type: ignore[attr-defined] # not in torch's stubs
            for number in (self._number, self._number + 1):
                store.compare_set(f"paceline/verdict/{number}", "", verdict)

    def _agreed(self, text: bytes) -> AgreedError:
        return Report.parse(text).as_error(self._topology.world_size)

    def read_fault(self, wait_s: float = 0.0) -> AgreedError | None:
        """Returns the error that a rank has published with `post_fault`, or None.

        Args:
            wait_s: How many seconds to wait for an error.
        """
        try:
            if wait_s > 0:
                self._store.wait([_FAULT], timedelta(seconds=wait_s))
            elif not self._store.check([_FAULT]):
                return None
            return self._agreed(self._store.get(_FAULT))
        except (RuntimeError, ParseError):  # no error within `wait_s`, or the store has ended
            return None

    def call_roll(self) -> None:
        """Asks every rank to show that it is alive, which each rank does with `answer_roll`."""
        self._store.set(_ROLL, "")
        self.post_news()

    def roll_is_called(self) -> bool:
        return bool(self._store.check([_ROLL]))

    def answer_roll(self) -> None:
        """Shows that this rank is alive, after a `call_roll`. Called at most once."""
        Attendance(self._store, _ROLL, self._topology.world_size).arrive(self._topology.rank)

    def missing_in_roll(self) -> set[int]:
        """Returns the ranks that have neither answered `call_roll` nor left the job."""
        missing = set(Attendance(self._store, _ROLL, self._topology.world_size).missing())
        return missing - self.left() if missing else missing

    def announce_stop(self) -> None:
        """Tells the other ranks, before the next collective, that this rank was asked to stop."""
        with suppress(RuntimeError):
            self._store.set(_STOP, "")
            self.post_news()

    def stop_announced(self) -> bool:
        return bool(self._store.check([_STOP]))

    def post_news(self) -> None:
        """Makes every rank check the store for an error, a stop request or a roll call."""
        self._store.set(_NEWS, "")

    def has_news(self) -> bool:
        return bool(self._store.check([_NEWS]))

    def leave(self, wait_s: float = _LEAVE_WAIT_S) -> None:
        """Records in the store that this rank does not need the store any more.

        If rank 0 hosts the store, rank 0 waits up to `wait_s` seconds for the other ranks. Otherwise the
        store could end before a slower rank has read why all ranks end.
        """
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
        """Returns the ranks that have called `leave`."""
        size = self._topology.world_size
        return set(range(size)) - set(Attendance(self._store, _LEFT, size).missing())
