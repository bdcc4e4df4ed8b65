"""Which rank is gone, after a collective broke: as the failed rank has posted, by the address in the
backend's error, or because its heartbeats have stopped."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from paceline.comm.agreement import AgreedError, Agreement, PeerError
from paceline.comm.job import RankHosts, format_ranks
from paceline.comm.process_groups import backend_reason
from paceline.comm.watchdog import Watchdog
from paceline.core.errors import CommError

# How long a rank whose collective broke waits for the rank that failed to post its error.
_FAULT_WAIT_S = 2.0
_SUSPECT_WAITS, _SUSPECT_PAUSE_S = 12, 0.25


class LostRanks:
    """Makes the error of a broken collective, the same on all ranks where they can still agree."""

    def __init__(
        self,
        rank: int,
        agreement: Agreement | None = None,
        watchdog: Watchdog | None = None,
        hosts: RankHosts | None = None,
    ) -> None:
        self._rank = rank
        self._agreement = agreement
        self._watchdog = watchdog
        self._hosts = hosts or RankHosts()

    def posted_fault(self) -> AgreedError | None:
        """The error that a failed rank has posted, or posts within seconds."""
        return self._agreement.read_fault(_FAULT_WAIT_S) if self._agreement else None

    def broken(self, what: str, error: RuntimeError) -> PeerError:
        """For a collective of the backend: who failed and why, where that is known."""
        return self._explained(
            str(error),
            lambda gone: PeerError(
                f"{what} broke on rank {self._rank}: {gone or 'another rank is gone'} "
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
        if not is_certain or self._agreement is None:
            return error
        self._agreement.post_fault(error)
        first = self._agreement.read_fault()
        return error if first is None else PeerError.from_agreed(first)

    def _suspect(self, error: str) -> str:
        """Who is gone, by the peer's address in the backend's error; empty where that is unknown."""
        for address in re.findall(r"\[?([0-9a-fA-F.:]+)\]?:\d+", error):
            suspect = self._hosts.gone_text(address)
            if suspect and self._agreement is not None:
                return self._agreement.first_suspect(suspect)
        return ""

    def silent(self) -> str:
        """Who is gone, as another rank has found, or because it does not answer; empty where all
        answer."""
        known = self._agreement.known_suspect() if self._agreement is not None else ""
        if known:
            return known
        ranks = self._watchdog.silent_ranks() if self._watchdog is not None else set()
        if self._agreement is None:
            return ""
        if not ranks:
            return self._suspect_of_reader()
        verb = "gives" if len(ranks) == 1 else "give"
        return self._agreement.first_suspect(f"{format_ranks(ranks)} {verb} no sign of life")

    def _suspect_of_reader(self) -> str:
        """Where ranks are many one of them reads all heartbeats, and the others wait for what it
        finds."""
        assert self._agreement is not None
        waits = 0 if self._watchdog is None or self._watchdog.all_read else _SUSPECT_WAITS
        for _ in range(waits):
            if known := self._agreement.known_suspect():
                return known
            time.sleep(_SUSPECT_PAUSE_S)
        return self._agreement.known_suspect()
