"""Agreement over the rendezvous store, apart from the collectives.

In: what each rank found (an error, or facts that must be equal everywhere). Out: on every rank the
same verdict: all is well, or one and the same error. It works before the first collective, between
ranks whose state differs, and needs neither GPU nor backend.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import Store

from paceline.comm.active_clock import ActiveClock
from paceline.core.errors import CommError, PacelineError
from paceline.core.topology import Topology

_FAULT = "paceline/fault"
_STOP = "paceline/stop"
_SUSPECT = "paceline/suspect"
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.002, 0.1
_GRACE_S = 15.0


class AgreedError(PacelineError):
    """An error that every rank raises alike; `exit_code` is that of the rank that found it."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class PeerError(CommError):
    """Something broke because another process is gone: a consequence, not a cause."""

    @classmethod
    def told(cls, cause: AgreedError) -> PeerError:
        """With the words, and the exit code, of the rank that failed."""
        error = cls(str(cause))
        error.exit_code = cause.exit_code
        return error


class Agreement:
    """Settles phases of a run among all ranks. Each phase's name is used once in a run; where several
    runs share the group, `run` keeps their phases apart."""

    def __init__(self, store: Store, topology: Topology, timeout_s: float) -> None:
        self._store = store
        self._topology = topology
        self._timeout_s = timeout_s
        self.run = ""

    def settle(
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
        """Rank 0's judgement of what all ranks say."""
        mine = {"error": str(error) if error else None, "code": error.exit_code if error else 0}
        self._store.set(
            self._key(phase, self._topology.rank), json.dumps({**mine, "facts": dict(facts or {})})
        )
        if self._topology.is_main:
            verdict = self._judge(phase, remedy)
            self._store.set(self._key(phase, "verdict"), json.dumps(verdict))
            return verdict
        found: dict[str, Any] = json.loads(self._wait(phase, "verdict"))
        return found

    def _judge(self, phase: str, remedy: str) -> dict[str, Any]:
        """Rank 0 reads all ranks; the first error, else the first difference, is the verdict."""
        said = []
        for rank in range(self._topology.world_size):
            try:
                said.append(json.loads(self._wait(phase, rank)))
            except (CommError, AgreedError) as error:
                return {"error": str(error), "code": error.exit_code}
        for rank, word in enumerate(said):
            if word["error"]:
                where = f"rank {rank}: " if self._topology.world_size > 1 else ""
                return {"error": where + word["error"], "code": word["code"]}
        for rank, word in enumerate(said):
            for name in sorted(said[0]["facts"].keys() | word["facts"].keys()):
                ours, theirs = said[0]["facts"].get(name), word["facts"].get(name)
                if ours != theirs:
                    text = f"ranks differ in {name}: {ours!r} on rank 0, {theirs!r} on rank {rank}"
                    return {"error": f"{text}; {remedy}", "code": 2}
        return {"error": None, "code": 0}

    def _key(self, phase: str, who: int | str) -> str:
        return f"paceline/{self.run}{phase}/{who}"

    def _wait(self, phase: str, who: int | str) -> bytes:
        """What `who` says; ends early where a rank has left word that it failed on the way."""
        key, pause_s = self._key(phase, who), _FIRST_PAUSE_S
        # Rank 0 gives up first: it knows who is missing, and tells the others.
        patience_s = self._timeout_s + (_GRACE_S if who == "verdict" else 0.0)
        clock = ActiveClock()
        while not self._store.check([key]):
            told = self.read_fault()
            # Whoever judged may have failed right after it: then its judgement is there by now.
            if told is not None and not self._store.check([key]):
                raise told
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
        """Leaves this rank's error where the others find it; the first one stays."""
        word = json.dumps(
            {"rank": self._topology.rank, "error": str(error), "code": error.exit_code}
        )
        # Where the store is gone with its host there is nobody to tell, and the error itself counts.
        with suppress(RuntimeError):
            self._store.compare_set(_FAULT, "", word)

    def read_fault(self, wait_s: float = 0.0) -> AgreedError | None:
        """The error that some rank left, if any; waits up to `wait_s` for one."""
        try:
            if wait_s > 0:
                self._store.wait([_FAULT], timedelta(seconds=wait_s))
            elif not self._store.check([_FAULT]):
                return None
            word = json.loads(self._store.get(_FAULT))
        except RuntimeError:  # nothing came, or the store went away with its host
            return None
        where = f"rank {word['rank']}: " if self._topology.world_size > 1 else ""
        return AgreedError(where + word["error"], word["code"])

    def first_suspect(self, suspect: str) -> str:
        """Whom the first rank whose connection broke takes to be gone. The ranks that leave next break
        other connections in turn, and would be blamed for it."""
        try:
            return bytes(self._store.compare_set(_SUSPECT, "", suspect)).decode() or suspect
        except RuntimeError:
            return suspect

    def known_suspect(self) -> str:
        """What another rank has found already; empty where nothing."""
        try:
            if self._store.check([_SUSPECT]):
                return bytes(self._store.get(_SUSPECT)).decode()
        except RuntimeError:
            pass
        return ""

    def announce_stop(self) -> None:
        """Lets ranks that were not signalled know, before the next collective, that one was."""
        with suppress(RuntimeError):
            self._store.set(_STOP, "")

    def stop_announced(self) -> bool:
        try:
            return bool(self._store.check([_STOP]))
        except RuntimeError:
            return False

    def leave(self, wait_s: float) -> None:
        """Says that this rank will ask no more; rank 0, where it hosts the store, waits for the rest.

        Else the store would be gone before a slower rank has read why all of them end.
        """
        ranks = range(self._topology.world_size)
        with suppress(RuntimeError):
            self._store.set(self._key("left", self._topology.rank), "")
            if self._topology.is_main and self._topology.launcher != "torchrun":
                keys = [self._key("left", rank) for rank in ranks]
                self._store.wait(keys, timedelta(seconds=wait_s))
