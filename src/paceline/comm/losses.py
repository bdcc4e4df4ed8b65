"""`LossLog`: the log in the rendezvous store of the members that a job has lost.

A member is a rank of the job's first generation; its number is never used again. Only the supervisor of
a member reports its loss, after the process has ended, so a lost member never acts again. The entries
have an order that is the same for all readers. Generation n consists of the first members without those
that the entries 1 to n name. So all members that have read n entries know the same generation without an
agreement. A job that has finished its last step writes this into the same log, and members that wait for
the next generation end.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Self

from torch.distributed.distributed_c10d import Store

from paceline.comm.agreement import came, peek
from paceline.core.untrusted import ParseError, is_count, parse_table

_ENTRY = "paceline/elastic/log"
_EVICTION = "paceline/elastic/evict"
_BEGUN = "paceline/elastic/begun"
_LONGEST_CAUSE = 10_000
_MOST_MEMBERS = 1 << 20
# Torch logs each wait that ends without the key, so one wait lasts a day.
_WAIT_S = 86_400.0


class LossLog:
    """Reads and writes the log of the ranks (members) that a job has lost.

    Args:
        store: The store of the launcher, without a prefix. `wait` blocks a connection: a thread that
            calls it needs a separate log (`own_connection`).
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        # The causes of lost members, in the order of the log.
        self.lost: dict[int, str] = {}
        self.length = 0
        self.finished = False
        self._evictions = 0

    def own_connection(self) -> Self:
        """Returns a log with its own connection to the store, which has read the same entries."""
        log = type(self)(self._store.clone())  # type: ignore[attr-defined]
        log.lost, log.length, log.finished = dict(self.lost), self.length, self.finished
        return log

    def begin(self) -> None:
        """Records that the first generation has formed. A member lost before this ends the job."""
        self._store.set(_BEGUN, "")

    def has_begun(self) -> bool:
        return bool(self._store.check([_BEGUN]))

    def read(self) -> bool:
        """Reads the entries that have been written since the last call; True if there are any."""
        before = self.length
        while text := peek(self._store, f"{_ENTRY}/{self.length + 1}"):
            self._note(text)
        return self.length > before

    def wait(self, limit_s: float = _WAIT_S) -> bool:
        """Waits for the next entry and reads all entries; False if `limit_s` seconds have passed."""
        return came(self._store, f"{_ENTRY}/{self.length + 1}", limit_s) and self.read()

    def report(self, members: Collection[int], cause: str) -> None:
        """Reports members whose processes have ended. Only their supervisor may call this."""
        self._append({"lost": sorted(members), "cause": cause})

    def finish(self) -> None:
        """Records that all members have applied the last update."""
        self._append({"finished": True})

    def evict(self, member: int, why: str) -> None:
        """Asks for the end of a silent member: its supervisor ends the process and reports the loss."""
        number, text = 1, json.dumps({"member": member, "why": why})
        while self._store.compare_set(f"{_EVICTION}/{number}", "", text) != text.encode():
            number += 1

    def evictions(self, limit_s: float = _WAIT_S) -> list[tuple[int, str]]:
        """Waits for requests of `evict`; returns new ones, or none if `limit_s` seconds have passed."""
        found = []
        if came(self._store, f"{_EVICTION}/{self._evictions + 1}", limit_s):
            while text := peek(self._store, f"{_EVICTION}/{self._evictions + 1}"):
                self._evictions += 1
                table = parse_table(text)
                member, why = table.get("member"), table.get("why")
                if not is_count(member, 0, _MOST_MEMBERS) or not isinstance(why, str):
                    raise ParseError("is not a request to end a rank")
                found.append((int(member), why[:_LONGEST_CAUSE]))
        return found

    def _append(self, entry: dict[str, Any]) -> None:
        """Writes an entry with the next free number. All writers see the same order, without gaps."""
        text = json.dumps(entry)
        while True:
            key = f"{_ENTRY}/{self.length + 1}"
            there = self._store.compare_set(key, "", text).decode(errors="replace")
            self._note(there)
            if there == text:
                return

    def _note(self, text: str) -> None:
        table = parse_table(text)
        members, cause = table.get("lost", []), table.get("cause", "")
        if (
            not isinstance(members, list)
            or not all(is_count(member, 0, _MOST_MEMBERS) for member in members)
            or not isinstance(cause, str)
            or len(cause) > _LONGEST_CAUSE
        ):
            raise ParseError("is not an entry of the log of lost ranks")
        self.length += 1
        self.lost |= dict.fromkeys(members, cause)
        self.finished = self.finished or table.get("finished") is True
