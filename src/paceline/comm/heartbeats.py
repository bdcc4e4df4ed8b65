"""`HeartbeatChannel`: what the watchdogs of all ranks exchange through the rendezvous store.

Each rank publishes its progress with every beat and looks for news: a verdict, or that some rank was
asked to stop. That is two requests a beat. Who reads the progress of all ranks reads N values, so where
ranks are many only one does, for as long as it renews its claim.
"""

from __future__ import annotations

import json
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
_READER = "paceline/watchdog/reader"
_END_WAIT_S = 0.5
_POLL_S = 0.02
# How soon a rank learns that another was asked to stop.
_LONGEST_LOOK_S = 1.0
# How often the rank that reads who has answered a call does so, and how much longer than two looks it
# waits for them: a host may have more ranks than cores.
_CALLING_S = 0.1
_ANSWER_S = 0.5
# Up to so many ranks each may read the heartbeats of all.
_ALL_READ = 64
# A reader that has not renewed its claim for so many beats is replaced.
_STALE_BEATS = 3
# Of the keys that the store's host asks for until all ranks have read the verdict.
_KEYS_PER_S = 50_000


class HeartbeatChannel:
    """Publishes this rank's progress in the rendezvous store, reads the others', and shares one
    verdict.

    A thread makes every call, on a connection of its own: where the store's host is cut off, torch
    waits for an answer without end, and only this thread is lost. Nothing else here waits for the store
    but the constructor and, briefly, `close`.
    """

    def __init__(self, store: Store, topology: Topology, beat_s: float) -> None:
        with names_from_files():
            self._store: Store = store.clone()  # type: ignore[attr-defined] # not in torch's stubs
        self._agreement = Agreement(self._store, topology, beat_s)
        self._rank, self._size = topology.rank, topology.world_size
        self._beat_s = beat_s
        self._mine = RankProgress()
        self._proposal: CommError | None = None
        self._wake = threading.Event()
        self._closed = False
        # Results of the thread; each is replaced as a whole.
        self.answers = 0
        self.lost = False
        self.verdict: AgreedError | None = None
        self.verdict_here: CommError | None = None  # the same, where this rank's proposal won
        self.heartbeats: dict[int, tuple[int, RankProgress]] = {}
        self.left: set[int] = set()
        # What the thread reads with each beat. The watchdog asks for the others' progress once this rank
        # has waited for long, and for a posted error, which then is why it waits.
        self.reads_progress = False
        self.reads_fault = False
        self.reads = False
        # Whether this rank calls the others, and who has not answered as far as it has read.
        self._calls_roll = self._answered_roll = False
        self.unanswered: set[int] | None = None
        self._claim, self._claim_seen_s = "", 0.0
        self.fault: AgreedError | None = None
        self.stop_announced = False
        self._publish_at = 0.0
        self._publish()
        self._thread = threading.Thread(target=self._serve, name="paceline-heartbeat", daemon=True)
        self._thread.start()

    @property
    def all_read(self) -> bool:
        return self._size <= _ALL_READ

    def publish(self, progress: RankProgress) -> None:
        """With the next beat."""
        self._mine = progress

    def propose(self, error: CommError) -> None:
        """The first proposal of all ranks becomes the verdict."""
        self._proposal = error
        self._wake.set()

    def linger(self, wait_s: float) -> None:
        """On the store's host: waits until the others have read the verdict."""
        deadline = time.monotonic() + wait_s
        keys = [self._read_key(rank) for rank in range(self._size) if rank != self._rank]
        try:
            store: Store = self._store.clone()  # type: ignore[attr-defined]
            while time.monotonic() < deadline and not store.check(keys):
                time.sleep(max(_POLL_S, len(keys) / _KEYS_PER_S))
        except RuntimeError:
            return

    def silent_ranks(self) -> set[int]:
        """Ranks whose process does not run any more. All ranks are called, and their heartbeat threads
        answer at their next look, whatever else they do: also a rank that is about to leave, because
        its connections broke with those of the lost one. Rank 0, where the store that it hosts is gone.
        Waits for two looks, or until all have answered."""
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
        """Until the next look. Where ranks are many a broken collective makes all of them call: those
        that have answered and do not read keep their usual pace, which the store can serve."""
        look_s = min(self._beat_s, _LONGEST_LOOK_S)
        hurries = self._calls_roll and (self.reads or not self._answered_roll)
        return min(look_s, _CALLING_S) if hurries else look_s

    def _beat(self) -> None:
        if time.monotonic() >= self._publish_at:
            self._publish()
        if self._proposal is not None:
            # The first posted fault stays: a rank that reported its own error knows best, and of two
            # proposals at once one counts, also for a rank that reads the fault alone.
            self._agreement.post_fault(self._proposal)
            fault = self._agreement.read_fault() or self._proposal
            verdict = json.dumps({"error": str(fault), "code": fault.exit_code})
            self._store.compare_set(_VERDICT, "", verdict)
            self._agreement.post_news()
        if self._calls_roll and not self._answered_roll:
            self._agreement.call_roll()
        self.reads = (self.reads_progress or self._calls_roll) and self._may_read()
        if self.reads and self._calls_roll and self._answered_roll:
            self.unanswered = self._agreement.missing_in_roll()
        if self.reads and self.reads_progress:
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
                found = Report.parse(self._store.get(_VERDICT))
            except ParseError:  # a stranger's
                return
            if found.error == f"rank {self._rank}: {self._proposal}":
                self.verdict_here = self._proposal
            self.verdict = AgreedError(found.error, found.code)
            # Last: after this the store's host may end at once, and the store with it.
            self._store.set(self._read_key(self._rank), "")

    def _may_read(self) -> bool:
        """Whether this rank is the one that reads for all, or they are few."""
        if self.all_read:
            return True
        mine, now = f"{self._rank} {self.answers}", time.monotonic()
        stale = now - self._claim_seen_s > _STALE_BEATS * self._beat_s
        replaces = self._claim if self.reads or stale else ""
        found = self._store.compare_set(_READER, replaces, mine).decode(errors="replace")
        if found != self._claim:
            self._claim, self._claim_seen_s = found, now
        return found == mine

    def _publish(self) -> None:
        self._publish_at = time.monotonic() + self._beat_s - _POLL_S
        self._store.set(self._key(self._rank), f"{self.answers} {self._mine.to_text()}")

    def _key(self, rank: int) -> str:
        return f"paceline/watchdog/{rank}"

    def _read_key(self, rank: int) -> str:
        return f"paceline/watchdog/heard/{rank}"


def _parse(heartbeat: bytes) -> tuple[int, RankProgress] | None:
    """The number of the beat, which shows that the sender is alive, and its progress; None for what no
    rank has written."""
    number, _, text = heartbeat.decode(errors="replace").partition(" ")
    try:
        return int(number), RankProgress.from_text(text)
    except ValueError:
        return None
