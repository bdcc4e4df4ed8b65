"""`WatchdogMail`: the watchdog's letters to the other ranks, through the rendezvous store.

In: this rank's standing, and perhaps a verdict. Out: the others' standings, when asked for, and the one
verdict that all share. A thread of its own makes every call, on a connection of its own: where the
store's host is cut off, torch waits for an answer without end, and only this thread is lost.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from paceline.comm.agreement import AgreedError, Agreement
from paceline.comm.progress_board import Standing
from paceline.core.errors import CommError
from paceline.core.topology import Topology

_VERDICT = "paceline/watchdog/verdict"
_END_WAIT_S = 0.5
_POLL_S = 0.02


class WatchdogMail:
    """Nothing here waits for the store but the constructor, `close` (briefly) and the thread."""

    def __init__(self, store: Store, topology: Topology, beat_s: float) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined] # not in torch's stubs
        self._agreement = Agreement(self._store, topology, beat_s)
        self._rank, self._size = topology.rank, topology.world_size
        self._beat_s = beat_s
        self._mine = Standing()
        self._proposal: CommError | None = None
        self._wake = threading.Event()
        self._closed = False
        # What the thread found; each is replaced as a whole.
        self.answers = 0
        self.lost = False
        self.verdict: AgreedError | None = None
        self.verdict_here: CommError | None = None  # the same, where this rank's proposal won
        self.letters: dict[int, tuple[int, Standing]] = {}
        self.curious = False
        # `listening`: this rank has waited for a while, so an error that another rank has posted is why.
        self.listening = False
        self._counting = False
        self.fault: AgreedError | None = None
        self._post()
        self._thread = threading.Thread(target=self._serve, name="paceline-mail", daemon=True)
        self._thread.start()

    def post(self, standing: Standing) -> None:
        """Goes out with the next beat."""
        self._mine = standing

    def propose(self, error: CommError) -> None:
        """The first proposal of all ranks becomes the verdict."""
        self._proposal = error
        self._wake.set()

    def linger(self, wait_s: float) -> None:
        """On the store's host: stays until the others have read the verdict."""
        deadline = time.monotonic() + wait_s
        keys = [self._heard(rank) for rank in range(self._size) if rank != self._rank]
        try:
            store: Store = self._store.clone()  # type: ignore[attr-defined]
            while time.monotonic() < deadline and not store.check(keys):
                time.sleep(_POLL_S)
        except RuntimeError:
            return

    def silent_ranks(self, stop: Callable[[], bool]) -> set[int]:
        """Ranks whose heartbeat does not advance; waits for two beats, until all others have shown one,
        or until `stop`. Rank 0 where its store is gone with it."""
        deadline = time.monotonic() + 2.5 * self._beat_s + _POLL_S
        others = set(range(self._size)) - {self._rank}
        before, first, alive = self.answers, dict[int, int](), set[int]()
        self._counting = True
        self._wake.set()
        while time.monotonic() < deadline and not self.lost and alive != others:
            if stop():
                first = {}
                break
            time.sleep(_POLL_S)
            if self.answers > before:  # what was read before this call may be old
                seen = {rank: number for rank, (number, _) in self.letters.items()}
                first = first or seen
                alive |= {rank for rank in others & seen.keys() if seen[rank] > first[rank]}
        self._counting = False
        if self.lost:
            return {0} & others if hosts_store() else set()
        return others - alive if first else set()

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join(_END_WAIT_S)

    def _serve(self) -> None:
        while not self._closed and self.verdict is None:
            try:
                self._beat()
            except RuntimeError:
                # Its process has ended. Nobody can be told any more; the watchdog decides.
                self.lost = True
                return
            self.answers += 1
            self._wake.wait(self._beat_s)
            self._wake.clear()

    def _beat(self) -> None:
        self._post()
        if self._proposal is not None:
            # The first fault stays: a rank that could say itself what went wrong knows best, and of
            # two proposals at once one counts, also for a rank that asks for the fault alone.
            self._agreement.post_fault(self._proposal)
            fault = self._agreement.read_fault() or self._proposal
            word = json.dumps({"error": str(fault), "code": fault.exit_code})
            self._store.compare_set(_VERDICT, "", word)
        if self.curious or self._counting:
            keys = [self._key(rank) for rank in range(self._size)]
            self.letters = dict(enumerate(map(_read, self._store.multi_get(keys))))
        if self.listening:
            self.fault = self._agreement.read_fault()
        if self._store.check([_VERDICT]):
            word = json.loads(self._store.get(_VERDICT))
            if word["error"] == f"rank {self._rank}: {self._proposal}":
                self.verdict_here = self._proposal
            self.verdict = AgreedError(word["error"], word["code"])
            # After that: the host may go at once, and with it the store for the run's own questions.
            self._store.set(self._heard(self._rank), "")

    def _post(self) -> None:
        self._store.set(self._key(self._rank), f"{self.answers} {self._mine.to_text()}")

    def _key(self, rank: int) -> str:
        return f"paceline/watchdog/{rank}"

    def _heard(self, rank: int) -> str:
        return f"paceline/watchdog/heard/{rank}"


def _read(letter: bytes) -> tuple[int, Standing]:
    """The number of the beat, which tells that the sender lives, and its standing."""
    number, _, text = letter.decode().partition(" ")
    return int(number), Standing.from_text(text)


def hosts_store() -> bool:
    """Whether rank 0's process has the store; under torchrun its agent does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
