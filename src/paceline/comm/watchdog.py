"""`Watchdog`: ends a rank whose exchange stalls, and reports which bucket and because of which rank.

Python cannot interrupt a wait in C++, so threads do it. In a healthy run each rank publishes a
heartbeat every few seconds and does nothing else.

1. A rank that has waited in one place for 40 % of `comm.timeout_s` reads the others' heartbeats. Of more
   than 64 ranks only one reads for all.
2. Shortly before the timeout the first such rank proposes what it found. All ranks take that verdict,
   also those that only compute, show it and end with its exit code.
3. Where the store does not answer, rank 0's host is gone or this one is cut off: a rank that waits, or
   that has received no answer for as long, reports it and ends.
4. A rank that leaves with an error has seconds to do so; torch may wait for a lost host without end.
5. A rank whose collective cannot fail by itself (NCCL, a CUDA graph) ends with the error that another
   rank has posted. Once a signal has asked it to stop, it waits `_STOP_WAIT_S` for a silent rank.

The watchdog uses two threads: `HeartbeatChannel` publishes and reads heartbeats, `Watchdog` checks
them, because a call to a store on an unreachable host can block forever.

`LostRanks` finds which rank is gone after a collective broke: as the failed rank has posted, by the
address in the backend's error, or because its heartbeats have stopped.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch.distributed.distributed_c10d import Store

from paceline.comm.agreement import ActiveClock, Agreement
from paceline.comm.collectives import backend_reason
from paceline.comm.heartbeats import HeartbeatChannel
from paceline.comm.job import RankHosts, format_ranks, rank_hosts_store
from paceline.comm.peer_errors import AgreedError, PeerError, ShowError
from paceline.comm.progress import BucketInfo, ProgressBoard, RankProgress
from paceline.comm.stalls import stall_error, unreachable_error
from paceline.core.errors import CommError, PacelineError
from paceline.core.host import in_thread
from paceline.core.topology import Topology

# Longer than a rank waits for the cause and for the others to leave (see `group.py`).
_LEAVE_S = 10.0
_END_WAIT_S = 0.5
# Long enough for hosts with many more ranks than cores.
_SHOW_WAIT_S = 8.0
_FREE_WAIT_S = 4.0
_LINGER_S = 3.0
# How many ranks have read a verdict in a second, at the least.
_RANKS_PER_S = 500
# torchrun kills ranks 30 s after its SIGTERM: a lost rank has to be found and named before.
_STOP_WAIT_S = 15.0
# Often enough that a lost rank is named within seconds, seldom enough for thousands of ranks.
_LONGEST_BEAT_S = 2.0
# Of all ranks together, where the timeout allows; each makes two requests to a store that serves some
# 50,000 a second.
_BEATS_PER_S = 4_000


def beat_interval_s(timeout_s: float, ranks: int) -> float:
    """Seconds between two heartbeats of a rank. A silent rank is found within seven of them, for which
    40 % of the timeout is there."""
    by_timeout_s = min(max(timeout_s / 60, 0.1), _LONGEST_BEAT_S)
    return max(by_timeout_s, min(ranks / _BEATS_PER_S, timeout_s / 20))


class Watchdog:
    """Two daemon threads, from joining the group until `close`."""

    def __init__(
        self,
        store: Store,
        topology: Topology,
        timeout_s: float,
        board: ProgressBoard,
        show_error: ShowError | None = None,
        hosts: RankHosts | None = None,
        *,
        before_exit: Callable[[], None] | None = None,
    ) -> None:
        """`show_error` shows an error where it cannot be raised. `before_exit` frees what outlives a
        process, in bounded time. All ranks create their watchdog before their first collective."""
        self._topology = topology
        self._timeout_s = timeout_s
        self._limit_s = timeout_s - min(0.2 * timeout_s, 15.0)
        self._silence_s = timeout_s / 6
        self._beat_s = beat_interval_s(timeout_s, topology.world_size)
        self._board = board
        self._show_error = show_error or _print_error
        self._hosts = hosts or RankHosts()
        self._before_exit = before_exit
        self.asked_to_stop: Callable[[], bool] = lambda: False
        self.buckets: Sequence[BucketInfo] = ()
        self._channel = HeartbeatChannel(store, topology, self._beat_s)
        self._now_s = 0.0
        self._seen: RankProgress | None = None
        self._since_s = self._answered_s = self._proposed_s = self._reads_since_s = 0.0
        self._answers = -1
        self._last_beat: dict[int, tuple[int, float]] = {}
        self._leaving: tuple[PacelineError, float] | None = None
        self._fault_since_s = 0.0
        self._asked_since_s: float | None = None
        # Either this thread ends the process or the run's own error does: a rank prints one line.
        self._ends = False
        self._end_lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="paceline-watchdog", daemon=True)
        self._thread.start()

    def leaving(self, error: BaseException) -> None:
        """This rank leaves with an error of its own, and ends with it should it get stuck.

        Does not return where there is a verdict and the error is only its consequence, because other
        ranks closed their connections as they ended: then this rank shows the verdict and ends with it.
        """
        follows = isinstance(error, PeerError) and self._channel.verdict is not None
        if not isinstance(error, PacelineError):
            error = PacelineError(f"{type(error).__name__}: {error}")
        with self._end_lock:
            superseded = follows or self._ends
            if not superseded and self._leaving is None:  # the first error counts
                self._leaving = (error, self._now_s + _LEAVE_S)
        if superseded:
            self._thread.join()

    def silent_ranks(self) -> set[int]:
        """Ranks whose process does not run any more, for a collective that broke. Waits for their
        answers for some seconds."""
        return self._channel.silent_ranks()

    @property
    def all_read(self) -> bool:
        """Whether every rank may read all heartbeats, because there are few."""
        return self._channel.all_read

    @property
    def stop_announced(self) -> bool:
        """Whether some rank was asked to stop, as the heartbeat thread has found."""
        return self._channel.stop_announced

    def hold_if_ending(self) -> None:
        """Does not return while this process is being ended: a collective that the abort has cut short
        returns with wrong numbers, which must not be used."""
        with self._end_lock:
            ends = self._ends
        if ends:
            self._thread.join()

    def close(self) -> None:
        """Does not return while a verdict is being shown: the process ends with it."""
        with self._end_lock:
            self._closed.set()
            ends = self._ends
        self._thread.join(None if ends else _END_WAIT_S)
        self._channel.close()

    def _serve(self) -> None:
        tick_s = self._beat_s / 2
        # A process that was stopped does not suspect others for the time that it lost itself.
        clock = ActiveClock(longest_s=4 * tick_s)
        while not self._closed.wait(tick_s):
            self._now_s = clock.now_s()
            error = self._check()
            if error is not None and self._may_end(error):
                self._end(error)

    def _may_end(self, error: PacelineError) -> bool:
        """False where this rank has begun to leave by itself, unless it got stuck."""
        with self._end_lock:
            left = self._closed.is_set() or (self._leaving and self._leaving[0] is not error)
            self._ends = not left
        return self._ends

    def _check(self) -> PacelineError | None:
        """The error that this rank has to end with, if any."""
        progress = self._board.progress
        if progress != self._seen:
            self._seen, self._since_s, self._proposed_s = progress, self._now_s, 0.0
        self._channel.publish(progress)
        if self._channel.answers != self._answers:
            self._answers, self._answered_s = self._channel.answers, self._now_s
        if self._leaving is not None:
            error, deadline_s = self._leaving
            return error if self._now_s > deadline_s else None
        if self._channel.verdict is not None:
            return self._channel.verdict_here or PeerError.from_agreed(self._channel.verdict)
        waited_s = self._now_s - self._since_s if progress.waits else 0.0
        unanswered_s = self._now_s - self._answered_s
        out_of_reach = unanswered_s > max(self._silence_s, 3 * self._beat_s)
        if unanswered_s > self._limit_s or (waited_s > self._limit_s and out_of_reach):
            return self._unreachable(progress, unanswered_s)
        self._channel.reads_fault = waited_s > 2 * self._beat_s
        if self._channel.fault is None or not self._channel.reads_fault:
            self._fault_since_s = self._now_s
        elif self._now_s - self._fault_since_s > 3 * self._beat_s:
            # Long enough for the exchange that brings the fault to all ranks, where it still works.
            return PeerError.from_agreed(self._channel.fault)
        self._channel.reads_progress = waited_s > 0.4 * self._timeout_s or self._is_asked_to_stop(
            waited_s
        )
        self._note_heartbeats()
        due = waited_s > self._limit_s or self._stops_for_a_silent_rank()
        if due and not self._proposed_s and self._has_observed():
            self._proposed_s = self._now_s
            self._channel.propose(self._stall(progress, waited_s))
        return None

    def _is_asked_to_stop(self, waited_s: float) -> bool:
        """Whether this rank waits although a signal has asked it to stop; records since when."""
        if not waited_s or not self.asked_to_stop():
            self._asked_since_s = None
        elif self._asked_since_s is None:
            self._asked_since_s = max(self._now_s, self._since_s)
        return self._asked_since_s is not None

    def _stops_for_a_silent_rank(self) -> bool:
        """A rank that is only slow is waited for: it may still be saving."""
        since_s = self._asked_since_s
        return since_s is not None and self._now_s - since_s > _STOP_WAIT_S and bool(self._silent())

    def _has_observed(self) -> bool:
        """Whether this rank reads the heartbeats, and for long enough to know who is silent. Else it
        leaves the verdict to the rank that does."""
        if not self._channel.reads:
            self._reads_since_s = self._now_s
        return self._channel.reads and self._now_s - self._reads_since_s > 4 * self._beat_s

    def _note_heartbeats(self) -> None:
        """Records when each rank's latest heartbeat was seen."""
        for rank, (number, _) in self._channel.heartbeats.items():
            if self._last_beat.get(rank, (-1, 0.0))[0] != number:
                self._last_beat[rank] = (number, self._now_s)

    def _stall(self, progress: RankProgress, waited_s: float) -> CommError:
        known = {rank: theirs for rank, (_, theirs) in self._channel.heartbeats.items()}
        known[self._topology.rank] = progress
        silent = self._silent()
        return stall_error(known, silent, self.buckets, waited_s, self._timeout_s, self._hosts)

    def _silent(self) -> set[int]:
        """Ranks without a new heartbeat for three beats that have not left the job, as ranks do whose
        connections broke with those of a lost one."""
        return {
            rank
            for rank, (_, seen_s) in self._last_beat.items()
            if rank != self._topology.rank
            and rank not in self._channel.left
            and self._now_s - seen_s > min(self._silence_s, 3 * self._beat_s)
        }

    def _unreachable(self, progress: RankProgress, unanswered_s: float) -> CommError:
        rank, closed = self._topology.rank, self._channel.lost
        reached = self._hosts.others_that_answer(rank, self._topology.master_port)
        host = self._topology.master_addr
        return unreachable_error(progress, rank, host, unanswered_s, closed, self._hosts, reached)

    def _end(self, error: PacelineError) -> None:
        """Without destructors and exit handlers, which would wait for the lost rank."""
        await_shown = in_thread(partial(self._show, error))
        await_freed = in_thread(self._before_exit or (lambda: None))
        if self._topology.is_main and rank_hosts_store() and not self._channel.lost:
            ranks_s = self._topology.world_size / _RANKS_PER_S
            self._channel.linger(2 * self._beat_s + _LINGER_S + ranks_s)
        self._channel.close()  # the store's host waits until this rank has read the verdict
        await_freed(_FREE_WAIT_S)
        await_shown(_SHOW_WAIT_S)
        os._exit(error.exit_code)

    def _show(self, error: PacelineError) -> None:
        """In a thread, because writing to a pipe that nobody reads blocks."""
        self._show_error(error)
        sys.stdout.flush()
        sys.stderr.flush()


def _print_error(error: PacelineError) -> None:
    sys.stderr.write(f"paceline: error: {error}\n")
    sys.stderr.flush()


# How long a rank whose collective broke waits for the rank that failed to post its error.
_FAULT_WAIT_S = 2.0
_SUSPECT_WAITS, _SUSPECT_PAUSE_S = 12, 0.25


@dataclass(frozen=True)
class LostRanks:
    """Makes the error of a broken collective, the same on all ranks where they can still agree."""

    rank: int
    agreement: Agreement
    watchdog: Watchdog | None
    hosts: RankHosts

    def posted_fault(self) -> AgreedError | None:
        """The error that a failed rank has posted, or posts within seconds."""
        return self.agreement.read_fault(_FAULT_WAIT_S)

    def broken(self, what: str, error: RuntimeError) -> PeerError:
        """For a collective of the backend: who failed and why, where that is known."""
        return self._explained(
            str(error),
            lambda gone: PeerError(
                f"{what} broke on rank {self.rank}: {gone or 'another rank is gone'} "
                f"({backend_reason(error)})",
                "the log of the first rank to fail has the cause; resume with --resume auto",
            ),
        )

    def peer_error(self, error: CommError) -> PeerError:
        """For an exchange that broke: the error that the failed rank posted, else `error` itself."""
        return self._explained(
            error.cause,
            lambda gone: PeerError(f"{error.cause}{gone and ': '}{gone}", error.remedy),
        )

    def _explained(self, cause: str, make: Callable[[str], PeerError]) -> PeerError:
        """The posted error, else what `make` says of the rank that is gone, or of an empty text."""
        suspect = self._suspect(cause)
        if fault := self.posted_fault():
            return PeerError.from_agreed(fault)
        gone = suspect or self.silent()
        return self._posted(make(gone), bool(gone) and not suspect)

    def _posted(self, error: PeerError, is_certain: bool) -> PeerError:
        """Where the lost ranks are known for certain, posts that, so that ranks whose own connections
        still stand end with the same line, and without a search of their own."""
        if not is_certain:
            return error
        self.agreement.post_fault(error)
        first = self.agreement.read_fault()
        return error if first is None else PeerError.from_agreed(first)

    def _suspect(self, error: str) -> str:
        """Who is gone, by the peer's address in the backend's error; empty where that is unknown."""
        for address in re.findall(r"\[?([0-9a-fA-F.:]+)\]?:\d+", error):
            if suspect := self.hosts.gone_text(address):
                return self.agreement.first_suspect(suspect)
        return ""

    def silent(self) -> str:
        """Who is gone, as another rank has found, or because it does not answer; empty where all
        answer."""
        if known := self.agreement.known_suspect():
            return known
        ranks = self.watchdog.silent_ranks() if self.watchdog is not None else set()
        if not ranks:
            return self._suspect_of_reader()
        verb = "gives" if len(ranks) == 1 else "give"
        return self.agreement.first_suspect(f"{format_ranks(ranks)} {verb} no sign of life")

    def _suspect_of_reader(self) -> str:
        """Where ranks are many one of them reads all heartbeats, and the others wait for what it
        finds."""
        waits = 0 if self.watchdog is None or self.watchdog.all_read else _SUSPECT_WAITS
        for _ in range(waits):
            if known := self.agreement.known_suspect():
                return known
            time.sleep(_SUSPECT_PAUSE_S)
        return self.agreement.known_suspect()
