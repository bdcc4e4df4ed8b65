"""`Watchdog`: ends a rank whose exchange stalls, and says which buffer and because of whom.

In: the group's store, a `ProgressBoard` and `comm.timeout_s`. Out: nothing in a healthy run but a small
post every few seconds. Python cannot interrupt a wait in C++, so a thread does it:

1. A rank that has waited in one place for 40 % of the timeout begins to read the others' posts.
2. Shortly before the timeout the first such rank proposes what it found; all ranks take that verdict,
   also one that only computes, show it and end with its exit code.
3. Where the store does not answer, rank 0's host is gone or this one is cut off: a rank that waits, or
   that has heard nothing for as long, says so and ends.
4. A rank that leaves with an error has seconds for it; torch may wait for a lost host without end.
5. A rank whose collective cannot fail by itself (NCCL, a CUDA graph) ends with the error that another
   rank has posted. Once a signal has asked it to stop, it waits `_STOP_WAIT_S` for a silent rank.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence

from torch.distributed.distributed_c10d import Store

from paceline.comm.active_clock import ActiveClock
from paceline.comm.agreement import PeerError
from paceline.comm.progress_board import ProgressBoard, Standing
from paceline.comm.rank_hosts import RankHosts
from paceline.comm.watchdog_mail import WatchdogMail, hosts_store
from paceline.comm.watchdog_words import BufferWords, stall_error, unreachable_error
from paceline.core.errors import CommError, PacelineError
from paceline.core.topology import Topology

Tell = Callable[[PacelineError], None]

# Longer than a rank waits to be told the cause and for the others to leave (see `group.py`).
_LEAVE_S = 10.0
_END_WAIT_S = 0.5
_LAST_WORDS_S = 2.0
_FREE_WAIT_S = 4.0
_LINGER_S = 3.0
# torchrun kills ranks 30 s after its SIGTERM: a lost rank has to be found and named before.
_STOP_WAIT_S = 15.0
# Often enough that a lost rank is named within seconds, seldom enough for thousands of ranks.
_LONGEST_BEAT_S = 2.0


class Watchdog:
    """Two daemon threads, from joining the group until `close`."""

    def __init__(
        self,
        store: Store,
        topology: Topology,
        timeout_s: float,
        board: ProgressBoard,
        tell: Tell | None = None,
        hosts: RankHosts | None = None,
        *,
        before_exit: Callable[[], None] | None = None,
    ) -> None:
        """`tell` shows an error where nobody can raise it. `before_exit` frees what outlives a process,
        in bounded time. All ranks make one before they first wait."""
        self._topology = topology
        self._timeout_s = timeout_s
        self._limit_s = timeout_s - min(0.2 * timeout_s, 15.0)
        self._silence_s = timeout_s / 6
        self._beat_s = min(max(timeout_s / 60, 0.1), _LONGEST_BEAT_S)
        self._board = board
        self._tell = tell or _tell
        self._hosts = hosts or RankHosts()
        self._before_exit = before_exit
        self.asked_to_stop: Callable[[], bool] = lambda: False
        self.buffers: Sequence[BufferWords] = ()
        self._mail = WatchdogMail(store, topology, self._beat_s)
        self._now_s = 0.0
        self._seen: Standing | None = None
        self._since_s = self._answered_s = self._proposed_s = 0.0
        self._answers = -1
        self._news: dict[int, tuple[int, float]] = {}
        self._leaving: tuple[PacelineError, float] | None = None
        self._fault_since_s = 0.0
        self._asked_since_s: float | None = None
        # Either this thread ends the process or the run's own error does: a rank says one line.
        self._ends = False
        self._end_lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="paceline-watchdog", daemon=True)
        self._thread.start()

    def leaving(self, error: BaseException) -> None:
        """This rank goes with an error of its own: that is what it shows, should it get stuck.

        Does not return where there is a verdict and the error is its consequence, of connections that
        other ranks closed as they ended: then the verdict is what this rank shows, and ends with.
        """
        follows = isinstance(error, PeerError) and self._mail.verdict is not None
        if not isinstance(error, PacelineError):
            error = PacelineError(f"{type(error).__name__}: {error}")
        with self._end_lock:
            spoken_for = follows or self._ends
            if not spoken_for and self._leaving is None:  # again, it changes nothing
                self._leaving = (error, self._now_s + _LEAVE_S)
        if spoken_for:
            self._thread.join()

    def silent_ranks(self) -> set[int]:
        """Whose heartbeat has stopped, where a collective broke. Waits for two beats at most, and not at
        all where a launcher has asked this rank to stop: it knows who ended."""
        return self._mail.silent_ranks(self.asked_to_stop)

    def hold_if_ending(self) -> None:
        """Does not return where this process is being ended: a collective that the abort has cut short
        returns with wrong numbers, and nothing may be made of them."""
        with self._end_lock:
            ends = self._ends
        if ends:
            self._thread.join()

    def close(self) -> None:
        """Does not return where the verdict is being shown: then the process ends with that."""
        with self._end_lock:
            self._closed.set()
            ends = self._ends
        self._thread.join(None if ends else _END_WAIT_S)
        self._mail.close()

    def _serve(self) -> None:
        tick_s = self._beat_s / 2
        # A process that was stopped does not suspect others for the time that it lost itself.
        clock = ActiveClock(longest_s=4 * tick_s)
        while not self._closed.wait(tick_s):
            self._now_s = clock.now_s()
            error = self._look()
            if error is not None and self._may_end(error):
                self._end(error)

    def _may_end(self, error: PacelineError) -> bool:
        """False where this rank has begun to leave by itself, unless it got stuck on the way."""
        with self._end_lock:
            left = self._closed.is_set() or (self._leaving and self._leaving[0] is not error)
            self._ends = not left
        return self._ends

    def _look(self) -> PacelineError | None:
        """What this rank has to end with, if anything."""
        standing = self._board.standing
        if standing != self._seen:
            self._seen, self._since_s, self._proposed_s = standing, self._now_s, 0.0
        self._mail.post(standing)
        if self._mail.answers != self._answers:
            self._answers, self._answered_s = self._mail.answers, self._now_s
        if self._leaving is not None:
            error, deadline_s = self._leaving
            return error if self._now_s > deadline_s else None
        if self._mail.verdict is not None:
            return self._mail.verdict_here or PeerError.told(self._mail.verdict)
        waited_s = self._now_s - self._since_s if standing.waits else 0.0
        unheard_s = self._now_s - self._answered_s
        out_of_reach = unheard_s > max(self._silence_s, 3 * self._beat_s)
        if unheard_s > self._limit_s or (waited_s > self._limit_s and out_of_reach):
            return self._unreachable(standing, unheard_s)
        self._mail.listening = waited_s > 2 * self._beat_s
        if self._mail.fault is None or not self._mail.listening:
            self._fault_since_s = self._now_s
        elif self._now_s - self._fault_since_s > 3 * self._beat_s:
            # Long enough for the exchange that tells all ranks of the fault, where it still goes on.
            return PeerError.told(self._mail.fault)
        self._mail.curious = waited_s > 0.4 * self._timeout_s or self._is_asked(waited_s)
        self._read_letters()
        if not self._proposed_s and (waited_s > self._limit_s or self._stops_for_a_silent_rank()):
            self._proposed_s = self._now_s
            self._mail.propose(self._stall(standing, waited_s))
        return None

    def _is_asked(self, waited_s: float) -> bool:
        """Whether this rank waits though a signal has asked it to stop; notes since when."""
        if not waited_s or not self.asked_to_stop():
            self._asked_since_s = None
        elif self._asked_since_s is None:
            self._asked_since_s = max(self._now_s, self._since_s)
        return self._asked_since_s is not None

    def _stops_for_a_silent_rank(self) -> bool:
        """A rank that is only slow is waited for: it may still be saving."""
        since_s = self._asked_since_s
        return since_s is not None and self._now_s - since_s > _STOP_WAIT_S and bool(self._silent())

    def _read_letters(self) -> None:
        """Notes when each rank's last news came."""
        for rank, (number, _) in self._mail.letters.items():
            if self._news.get(rank, (-1, 0.0))[0] != number:
                self._news[rank] = (number, self._now_s)

    def _stall(self, standing: Standing, waited_s: float) -> CommError:
        standings = {rank: theirs for rank, (_, theirs) in self._mail.letters.items()}
        standings[self._topology.rank] = standing
        silent = self._silent()
        return stall_error(standings, silent, self.buffers, waited_s, self._timeout_s, self._hosts)

    def _silent(self) -> set[int]:
        """Ranks of which nothing new has come for three beats."""
        return {
            rank
            for rank, (_, heard_s) in self._news.items()
            if rank != self._topology.rank
            and self._now_s - heard_s > min(self._silence_s, 3 * self._beat_s)
        }

    def _unreachable(self, standing: Standing, unheard_s: float) -> CommError:
        rank, closed = self._topology.rank, self._mail.lost
        reached = self._hosts.others_that_answer(rank, self._topology.master_port)
        host = self._topology.master_addr
        return unreachable_error(standing, rank, host, unheard_s, closed, self._hosts, reached)

    def _end(self, error: PacelineError) -> None:
        """Not by way of destructors and exit handlers: they wait for what does not come."""
        last_words = threading.Thread(target=self._say, args=(error,), daemon=True)
        last_words.start()
        freeing = threading.Thread(target=self._before_exit or (lambda: None), daemon=True)
        freeing.start()
        if self._topology.is_main and hosts_store() and not self._mail.lost:
            self._mail.linger(2 * self._beat_s + _LINGER_S)
        self._mail.close()  # the host waits for word that this rank has heard
        freeing.join(_FREE_WAIT_S)
        last_words.join(_LAST_WORDS_S)
        os._exit(error.exit_code)

    def _say(self, error: PacelineError) -> None:
        """In a thread: a pipe that nobody reads must not keep the process."""
        self._tell(error)
        sys.stdout.flush()
        sys.stderr.flush()


def _tell(error: PacelineError) -> None:
    sys.stderr.write(f"paceline: error: {error}\n")
    sys.stderr.flush()
