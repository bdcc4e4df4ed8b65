"""`HeartbeatChannel`: exchanges messages between the watchdogs of all ranks through the store.

With every heartbeat a rank publishes its progress and checks for news: an error on which the watchdogs
have agreed (the verdict), a request to show that it is alive (a roll call), or a stop request. This
takes two requests to the store. Reading the progress of all N ranks transfers N values, so in a large
job only some ranks read it.
"""

from __future__ import annotations

import threading
import time

from torch.distributed.distributed_c10d import Store

from paceline.comm.agreement import Agreement, Report
from paceline.comm.job import rank_hosts_store
from paceline.comm.peer_errors import AgreedError
from paceline.comm.progress import RankProgress
from paceline.comm.store import names_from_files
from paceline.core.errors import CommError
from paceline.core.topology import Topology
from paceline.core.untrusted import ParseError

_VERDICT = "paceline/watchdog/verdict"
_END_WAIT_S = 0.5
_POLL_S = 0.02
# Longest interval at which a rank reads the store, and so learns that another rank was asked to stop.
_LONGEST_LOOK_S = 1.0
# Interval at which readers read the store during a roll call. They wait for answers `_ANSWER_S` longer
# than the other ranks' interval requires, because a host may have more ranks than cores.
_CALLING_S = 0.1
_ANSWER_S = 0.5
# Number of ranks, spread over the job, that read the heartbeats of all ranks.
_READERS = 64
# Keys per second that the store's host checks until all ranks have read the verdict.
_KEYS_PER_S = 50_000


class HeartbeatChannel:
    """Publishes this rank's progress, reads the other ranks' progress, and shares one error.

    A thread makes the requests, on its own connection to the store. If the store's host is
    unreachable, torch waits for an answer forever, but only this thread is blocked. Only the
    constructor, `linger` and, briefly, `close` block the caller.
    """

    def __init__(self, store: Store, topology: Topology, beat_s: float) -> None:
        with names_from_files():
            self._store: Store = store.clone()  # type: ignore[attr-defined] # not in torch's stubs
        self._agreement = Agreement(self._store, topology, beat_s)
        self._rank, self._size = topology.rank, topology.world_size
        self._beat_s = beat_s
        self.is_reader = self._rank % -(-self._size // _READERS) == 0
        self._mine = RankProgress()
        self._proposal: CommError | None = None
        self._wake = threading.Event()
        self._closed = False
        # Results of the thread. The thread assigns new objects and does not modify published ones.
        self.answers = 0
        self.lost = False
        self.verdict: AgreedError | None = None
        self.verdict_here: CommError | None = None  # the verdict, if it is this rank's proposal
        self.heartbeats: dict[int, tuple[int, RankProgress]] = {}
        self.left: set[int] = set()
        # Set by the watchdog: what the thread additionally reads with each heartbeat. If this rank has
        # waited long, these are the progress of all ranks and a posted error.
        self.reads_progress = False
        self.reads_fault = False
        self.fault: AgreedError | None = None
        # Whether this rank calls the roll, and the ranks that had not answered at the latest reading.
        self._calls_roll = self._answered_roll = False
        self.unanswered: set[int] | None = None
        self.stop_announced = False
        self._publish_at = 0.0
        self._publish()
        self._thread = threading.Thread(target=self._serve, name="paceline-heartbeat", daemon=True)
        self._thread.start()

    def publish(self, progress: RankProgress) -> None:
        """Publishes `progress` with the next heartbeat."""
        self._mine = progress

    def propose(self, error: CommError) -> None:
        """Proposes the error with which all ranks end. The first proposal of any rank counts."""
        self._proposal = error
        self._wake.set()

    def linger(self, wait_s: float) -> None:
        """Waits up to `wait_s` seconds until the other ranks have read the proposed error.

        The process that hosts the store calls this before it ends.
        """
        deadline = time.monotonic() + wait_s
        keys = [self._read_key(rank) for rank in range(self._size) if rank != self._rank]
        try:
            store: Store = self._store.clone()  # type: ignore[attr-defined]
            while time.monotonic() < deadline and not store.check(keys):
                time.sleep(max(_POLL_S, len(keys) / _KEYS_PER_S))
        except RuntimeError:
            return

    def silent_ranks(self) -> set[int]:
        """Returns the ranks whose process has ended or does not answer a roll call.

        Asks all ranks to answer (a roll call). The heartbeat thread of each rank answers when it next
        reads the store, even while the main thread is blocked or this rank ends after a failed
        collective. Waits a little longer than two heartbeat intervals, or until all ranks have
        answered. If the store ended together with rank 0, returns rank 0.
        """
        look_s = min(self._beat_s, _LONGEST_LOOK_S)
        deadline = time.monotonic() + 2.5 * look_s + _ANSWER_S
        self._calls_roll = True
        self._wake.set()
        while time.monotonic() < deadline and not self.lost and self.unanswered != set():
            time.sleep(_POLL_S)
        self._calls_roll = False
        if self.lost:
            return {0} - {self._rank} if rank_hosts_store() else set()
        return self.unanswered or set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join(_END_WAIT_S)

    def _serve(self) -> None:
        while not self._closed and self.verdict is None:
            try:
                self._beat()
            except RuntimeError:
                # The store's process has ended; the watchdog decides what follows.
                self.lost = True
                return
            self.answers += 1
            self._wake.wait(self._pause_s())
            self._wake.clear()

    def _pause_s(self) -> float:
        """Returns the seconds until the heartbeat thread reads the store again.

        After a failed collective, ranks ask which ranks are alive (the roll call) and read the store
        more often. Ranks that have answered and do not read the other ranks' progress keep the normal
        interval, to limit the load of the store.
        """
        look_s = min(self._beat_s, _LONGEST_LOOK_S)
        hurries = self._calls_roll and (self.is_reader or not self._answered_roll)
        return min(look_s, _CALLING_S) if hurries else look_s

    def _beat(self) -> None:
        if time.monotonic() >= self._publish_at:
            self._publish()
        if self._proposal is not None:
            # An error that a rank has already posted takes precedence over the proposal. If two ranks
            # propose concurrently, the first posted error becomes the verdict of both.
            self._agreement.post_fault(self._proposal)
            fault = self._agreement.read_fault() or self._proposal
            verdict = Report(error=str(fault), code=fault.exit_code)
            self._store.compare_set(_VERDICT, "", verdict.to_text())
            self._agreement.post_news()
        if self._calls_roll and not self._answered_roll:
            self._agreement.call_roll()
        if self.is_reader and self._calls_roll and self._answered_roll:
            self.unanswered = self._agreement.missing_in_roll()
        if self.is_reader and self.reads_progress:
            keys = [self._key(rank) for rank in range(self._size)]
            read = enumerate(map(_parse, self._store.multi_get(keys)))
            known = {rank: beat for rank, beat in read if beat is not None}
            self.heartbeats = {**self.heartbeats, **known}
            self.left = self._agreement.left()
        if self.reads_fault:
            self.fault = self._agreement.read_fault()
        if self._agreement.has_news():
            self._read_news()

    def _read_news(self) -> None:
        self.stop_announced = self.stop_announced or self._agreement.stop_announced()
        if not self._answered_roll and self._agreement.roll_is_called():
            self._agreement.answer_roll()
            self._answered_roll = True
        if self._store.check([_VERDICT]):
            try:
                verdict = Report.parse(self._store.get(_VERDICT))
            except ParseError:  # written by a foreign process
                return
            if verdict.error == f"rank {self._rank}: {self._proposal}":
                self.verdict_here = self._proposal
            self.verdict = AgreedError(verdict.error, verdict.code)
            # This comes last, because the store's host may end as soon as it reads this key.
            self._store.set(self._read_key(self._rank), "")

    def _publish(self) -> None:
        self._publish_at = time.monotonic() + self._beat_s - _POLL_S
        self._store.set(self._key(self._rank), f"{self.answers} {self._mine.to_text()}")

    def _key(self, rank: int) -> str:
        return f"paceline/watchdog/{rank}"

    def _read_key(self, rank: int) -> str:
        return f"paceline/watchdog/heard/{rank}"


def _parse(heartbeat: bytes) -> tuple[int, RankProgress] | None:
    """Returns a heartbeat's number and its sender's progress; None if the text is invalid."""
    number, _, text = heartbeat.decode(errors="replace").partition(" ")
    try:
        return int(number), RankProgress.from_text(text)
    except ValueError:
        return None
