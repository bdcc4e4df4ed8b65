"""`Watchdog`: ends a rank whose collective does not end, and reports the bucket and the lost rank.

Python cannot interrupt a wait in C++, so threads do it. In a healthy run each rank publishes a
heartbeat every few seconds and does nothing else.

1. A rank that has waited in the same collective for 40 % of `comm.timeout_s` reads the heartbeats of all
   ranks. In a job of more than 64 ranks only some ranks do that.
2. Shortly before the timeout the first of these ranks proposes an error for all ranks, the verdict.
   All ranks, also ranks that only compute, show this error and end with its exit code.
3. If the store does not answer, rank 0's host has ended or this host has lost its network. A rank that
   has waited nearly `comm.timeout_s` for other ranks or for an answer reports this and ends.
4. A rank that leaves with an error is ended after some seconds, because torch might wait for a lost host
   forever.
5. A rank whose collective cannot fail by itself (NCCL, a CUDA graph) ends with the error that another
   rank has posted. After a stop signal, this rank waits only `_STOP_WAIT_S` for a silent rank.

The watchdog uses two threads, because a request to a store on an unreachable host can block forever:
`HeartbeatChannel` publishes and reads heartbeats, and `Watchdog` checks them.

After a collective has failed, `LostRanks` finds out which rank is lost: from the error that the failed
rank has posted, or by asking all ranks to answer (a roll call).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch.distributed.distributed_c10d import Store

from paceline.comm.agreement import ActiveClock, Agreement
from paceline.comm.collectives import backend_reason
from paceline.comm.heartbeats import HeartbeatChannel
from paceline.comm.job import RankHosts, rank_hosts_store
from paceline.comm.peer_errors import AgreedError, PeerError, ShowError
from paceline.comm.progress import BucketInfo, ProgressBoard, RankProgress
from paceline.comm.stalls import late_ranks, stall_error, unreachable_error
from paceline.core.errors import CommError, PacelineError
from paceline.core.host import in_thread
from paceline.core.topology import Topology

# Time limit for the teardown after an error. It is longer than a rank waits for the cause of the error
# and for the other ranks to leave (see `group.py`).
_LEAVE_S = 10.0
_END_WAIT_S = 0.5
# Time limit for showing the error; long enough for hosts with many more ranks than cores.
_SHOW_WAIT_S = 8.0
_FREE_WAIT_S = 4.0
_LINGER_S = 3.0
# At least this number of ranks can read a verdict in a second.
_RANKS_PER_S = 500
# torchrun kills ranks 30 s after it has sent SIGTERM; the message about a lost rank must come before.
_STOP_WAIT_S = 15.0
# Longest interval between heartbeats in small jobs: a lost rank is found within seconds.
_LONGEST_BEAT_S = 2.0
# Heartbeats per second of all ranks together, if the timeout permits it. Each heartbeat makes two
# requests to the store, which serves about 50,000 requests a second.
_BEATS_PER_S = 4_000


def beat_interval_s(timeout_s: float, ranks: int) -> float:
    """Returns the seconds between two heartbeats of a rank.

    A rank that has ended is noticed within seven heartbeats, which must fit into 40 % of the timeout.
    """
    by_timeout_s = min(max(timeout_s / 60, 0.1), _LONGEST_BEAT_S)
    return max(by_timeout_s, min(ranks / _BEATS_PER_S, timeout_s / 20))


class Watchdog:
    """Ends this process with an error message if a rank is lost or a collective takes too long.

    Its two daemon threads run until `close`. All ranks create their watchdog before their first
    collective.

    Args:
        store: The store that all ranks share.
        topology: This rank.
        timeout_s: The time limit of a collective in seconds.
        board: Records this rank's progress.
        show_error: Function that shows an error before the process ends. The default prints to stderr.
        hosts: The hosts of all ranks, for messages.
        before_exit: Function that frees resources that outlive the process. It runs before the process
            ends, which waits only a few seconds for it.
        evict: Gives up a late rank, for the given reason, so that the others can continue. If None, all
            ranks end.
    """

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
        evict: Callable[[int, str], None] | None = None,
    ) -> None:
        self._topology = topology
        self._evict = evict
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
        # True once this thread ends the process. Otherwise the error of the run itself does, so that a
        # rank prints only one error.
        self._ends = False
        self._end_lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="paceline-watchdog", daemon=True)
        self._thread.start()

    def leaving(self, error: BaseException) -> None:
        """Limits the time that this rank takes to end after `error`; then the process is ended.

        If the watchdogs have agreed on an error and `error` is only its consequence, because other
        ranks have closed their connections, this method does not return: this rank shows the agreed
        error and ends.
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
        """Asks all ranks to answer, waits some seconds, and returns those that have not answered."""
        return self._channel.silent_ranks()

    @property
    def is_reader(self) -> bool:
        """Returns True if this rank reads the heartbeats of all ranks."""
        return self._channel.is_reader

    @property
    def stop_announced(self) -> bool:
        """Returns True if the heartbeat thread has read that a rank was asked to stop."""
        return self._channel.stop_announced

    def hold_if_ending(self) -> None:
        """Blocks forever if the watchdog is ending this process; otherwise returns at once.

        When the process ends, NCCL's communicators are aborted. A collective that is aborted returns
        with wrong values, which the caller must not use.
        """
        with self._end_lock:
            ends = self._ends
        if ends:
            self._thread.join()

    def close(self) -> None:
        """Ends the watchdog's threads. Does not return if the watchdog is ending this process."""
        with self._end_lock:
            self._closed.set()
            ends = self._ends
        self._thread.join(None if ends else _END_WAIT_S)
        self._channel.close()

    def _serve(self) -> None:
        tick_s = self._beat_s / 2
        # The time during which this process is suspended (SIGSTOP) does not count as waiting.
        clock = ActiveClock(longest_s=4 * tick_s)
        while not self._closed.wait(tick_s):
            self._now_s = clock.now_s()
            error = self._check()
            if error is not None and self._may_end(error):
                self._end(error)

    def _may_end(self, error: PacelineError) -> bool:
        """Returns True if the watchdog may end the process with `error`.

        Returns False if the watchdog is closed, or while this rank leaves because of its own error and
        has not exceeded its time limit (`leaving`).
        """
        with self._end_lock:
            left = self._closed.is_set() or (self._leaving and self._leaving[0] is not error)
            self._ends = not left
        return self._ends

    def _check(self) -> PacelineError | None:
        """Returns the error with which the watchdog has to end this rank, or None."""
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
            return unreachable_error(
                progress, self._topology.rank, self._topology.master_addr, unanswered_s,
                self._channel.lost, self._hosts,
            )  # fmt: skip
        self._channel.reads_fault = waited_s > 2 * self._beat_s
        if self._channel.fault is None or not self._channel.reads_fault:
            self._fault_since_s = self._now_s
        elif self._now_s - self._fault_since_s > 3 * self._beat_s:
            # By now the exchange would have told all ranks about the fault, if it still worked.
            return PeerError.from_agreed(self._channel.fault)
        self._channel.reads_progress = waited_s > 0.4 * self._timeout_s or self._is_asked_to_stop(
            waited_s
        )
        self._note_heartbeats()
        due = waited_s > self._limit_s or self._stops_for_a_silent_rank()
        if due and not self._proposed_s and self._has_observed():
            self._proposed_s = self._now_s
            if self._evict is None or not self._evict_late(progress, waited_s, self._evict):
                self._channel.propose(self._stall(progress, waited_s))
        return None

    def _evict_late(
        self, progress: RankProgress, waited_s: float, evict: Callable[[int, str], None]
    ) -> bool:
        """Gives up the ranks for which this rank waits; returns False if there are none."""
        late = late_ranks(self._known(progress), self._silent()) - {self._topology.rank}
        for rank in late:
            why = f"kept the other ranks waiting for {waited_s:.0f} s"
            in_thread(partial(evict, rank, why))
        return bool(late)

    def _is_asked_to_stop(self, waited_s: float) -> bool:
        """Returns True if this rank waits for other ranks after a stop signal.

        Also records when this wait began.
        """
        if not waited_s or not self.asked_to_stop():
            self._asked_since_s = None
        elif self._asked_since_s is None:
            self._asked_since_s = max(self._now_s, self._since_s)
        return self._asked_since_s is not None

    def _stops_for_a_silent_rank(self) -> bool:
        """Returns True if this rank has waited `_STOP_WAIT_S` after a stop signal for a silent rank.

        A rank that is slow but not silent might be saving a checkpoint.
        """
        since_s = self._asked_since_s
        return since_s is not None and self._now_s - since_s > _STOP_WAIT_S and bool(self._silent())

    def _has_observed(self) -> bool:
        """Returns True if this rank has read heartbeats for long enough to know which ranks are silent.

        A rank that does not read the heartbeats of all ranks always returns False, and so never
        proposes an error for all ranks.
        """
        reads = self._channel.is_reader and self._channel.reads_progress
        if not reads:
            self._reads_since_s = self._now_s
        return reads and self._now_s - self._reads_since_s > 4 * self._beat_s

    def _note_heartbeats(self) -> None:
        """Records when each rank's latest heartbeat was seen."""
        for rank, (number, _) in self._channel.heartbeats.items():
            if self._last_beat.get(rank, (-1, 0.0))[0] != number:
                self._last_beat[rank] = (number, self._now_s)

    def _stall(self, progress: RankProgress, waited_s: float) -> CommError:
        known, silent = self._known(progress), self._silent()
        return stall_error(known, silent, self.buckets, waited_s, self._timeout_s, self._hosts)

    def _known(self, progress: RankProgress) -> dict[int, RankProgress]:
        """Returns the last known progress of all ranks."""
        known = {rank: theirs for rank, (_, theirs) in self._channel.heartbeats.items()}
        return known | {self._topology.rank: progress}

    def _silent(self) -> set[int]:
        """Returns the ranks that have missed about three heartbeats and have not left the job.

        A rank that has left is not silent: its own collective failed because of a lost rank.
        """
        return {
            rank
            for rank, (_, seen_s) in self._last_beat.items()
            if rank != self._topology.rank
            and rank not in self._channel.left
            and self._now_s - seen_s > min(self._silence_s, 3 * self._beat_s)
        }

    def _end(self, error: PacelineError) -> None:
        """Shows `error` and ends the process.

        Destructors and exit handlers do not run, because they would wait for the lost rank.
        """
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
        """Shows an error from a thread, because writing to a pipe that nobody reads blocks."""
        self._show_error(error)
        sys.stdout.flush()
        sys.stderr.flush()


def _print_error(error: PacelineError) -> None:
    sys.stderr.write(f"paceline: error: {error}\n")
    sys.stderr.flush()


# How long a rank whose collective broke waits for the error of the rank that failed.
_FAULT_WAIT_S = 2.0
# How long a rank that does not read all heartbeats waits for an error posted by a rank that does.
_READER_WAIT_S = 3.0


@dataclass(frozen=True)
class LostRanks:
    """Creates the error to raise after a failed collective, the same one on all ranks if possible.

    Ranks agree on the error through the rendezvous store, which might have ended with rank 0.
    """

    rank: int
    agreement: Agreement
    watchdog: Watchdog | None
    hosts: RankHosts

    def posted_fault(self) -> AgreedError | None:
        """Waits a few seconds for the error that a failed rank posts, and returns it, or None."""
        return self.agreement.read_fault(_FAULT_WAIT_S)

    def silent(self) -> str:
        """Asks all ranks to answer, and describes those that do not; returns "" if all answer.

        Waits some seconds for the answers.
        """
        ranks = set() if self.watchdog is None else self.watchdog.silent_ranks()
        if not ranks:
            return ""
        return (
            f"{self.hosts.describe(ranks)} {'gives' if len(ranks) == 1 else 'give'} no sign of life"
        )

    def broken(self, what: str, error: RuntimeError) -> PeerError:
        """Returns the error for a failed collective. It names the failed rank and the cause if known.

        Args:
            what: The name of the collective.
            error: The backend's error.
        """
        return self._explained(
            lambda gone: PeerError(
                f"{what} broke on rank {self.rank}: {gone or 'another rank has ended'} "
                f"({backend_reason(error)})",
                "the log of the first rank to fail has the cause; resume with --resume auto",
            ),
        )

    def peer_error(self, error: CommError) -> PeerError:
        """Returns the error to raise after a failed exchange.

        This is the error that the failed rank has posted. If no rank has posted one, it is `error`
        with a description of the lost ranks.
        """
        return self._explained(
            lambda gone: PeerError(f"{error.cause}{gone and ': '}{gone}", error.remedy),
        )

    def _explained(self, make: Callable[[str], PeerError]) -> PeerError:
        """Returns the error that a rank has posted, or else an error that `make` creates.

        Args:
            make: Creates the error from a text that describes the lost ranks; the text may be empty.
        """
        fault = self.posted_fault()
        if fault is None and self.watchdog is not None:
            if gone := self.silent():
                error = make(gone)
                # So that the other ranks end with the same line.
                self.agreement.post_fault(error)
                fault = self.agreement.read_fault()
                if fault is None:
                    return error
            elif not self.watchdog.is_reader:
                fault = self.agreement.read_fault(_READER_WAIT_S)
        return make("") if fault is None else PeerError.from_agreed(fault)
