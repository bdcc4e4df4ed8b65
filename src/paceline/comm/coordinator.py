"""Rank 0's part of a rendezvous: reads greetings, answers them, and waits until all ranks have come."""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.comm.agreement import ActiveClock, Agreement, peek
from paceline.comm.job import Attendance, JobIdentity, RankHost, format_ranks, post_hosts
from paceline.core.errors import CommError
from paceline.core.host import DeferredEnd
from paceline.core.topology import Topology
from paceline.core.untrusted import ParseError, is_count, parse_table

LOBBY = "paceline-lobby"
JOB = f"{LOBBY}/job"
COUNT = f"{LOBBY}/greetings"
_POLL_S = 0.02
# Where no job id decides whether a rank with other settings belongs to this job, rank 0 waits so long for
# the right one after refusing the wrong one.
_REFUSED_S = 30.0
LINGER_S = 1.0
# How long rank 0 stays after a rendezvous that failed, for ranks that have yet to read why.
_DISMISS_S = 3.0
# The same if a rank was asked to end while others may still start.
_EARLY_S = 5.0
# Of a greeting: many times what all settings take.
_LONGEST_GREETING = 1 << 20
TOKEN = re.compile(r"[0-9a-f]{32}")
_SIGNAL = re.compile(r"(SIG[A-Z0-9]{1,12})?")
_LARGEST_COUNT = 1 << 62
COMPLETE = "all of its ranks have joined already"


def restart_count() -> int:
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0


class Greeting(NamedTuple):
    """What a rank writes to join."""

    token: str
    rank: int
    restarts: int
    at: RankHost
    job: JobIdentity
    # The signal that asked the rank to end, or "".
    leaves: str

    @classmethod
    def parse(cls, text: bytes) -> Greeting:
        """Raises ParseError for a text that no rank has written."""
        if len(text) > _LONGEST_GREETING:
            raise ParseError("is too long")
        table = parse_table(text)
        token, rank, restarts = (table.get(name) for name in ("token", "rank", "restarts"))
        at, job = RankHost.from_list(table.get("at")), JobIdentity.from_table(table.get("job"))
        leaves = table.get("leaves", "")
        if (
            not isinstance(token, str)
            or not TOKEN.fullmatch(token)
            or not is_count(rank)
            or not is_count(restarts)
            or at is None
            or not isinstance(leaves, str)
            or not _SIGNAL.fullmatch(leaves)
        ):
            raise ParseError("is no greeting")
        return cls(token, rank, restarts, at, job, leaves)


def is_same(job: JobIdentity, other: JobIdentity) -> bool:
    """Whether both are ranks of one job beyond doubt, however they were started."""
    return bool(job.same_id(other)) or (
        job.same_id(other) is None and job.settings == other.settings
    )


class Coordinator:
    """Rank 0."""

    def __init__(
        self,
        store: Store,
        topology: Topology,
        job: JobIdentity,
        here: RankHost,
        agent_hosts: bool,
        end: DeferredEnd,
    ) -> None:
        self._end = end
        # Ranks that were asked to end before they had met the others, with the signal.
        self._leaving: dict[int, str] = {}
        self._answered: set[int] = set()
        self._store, self._topology, self._job = store, topology, job
        self._agent_hosts = agent_hosts
        self._name = uuid.uuid4().hex
        self._hosts = {0: here}
        # The largest restart count of any agent.
        self.restarts = restart_count()
        self._read = 0
        self._complete = False
        self._failure = ""
        self._unread: set[int] = set()
        self._refused: dict[int, str] = {}
        # Refused ranks that are of this job beyond doubt, so that it cannot start.
        self._refuses: list[int] = []
        self._refused_s = 0.0

    def admit_all(self, timeout_s: float, clock: ActiveClock) -> str:
        """The attempt's name, once every rank has its place."""
        self._publish_job(complete=False)
        all_in = f"{LOBBY}/in/{self._name}/all"
        take_place(self._store, self._name, self._topology)
        # The only rank that polls: it waits for greetings and for the last place at once.
        while not self._store.check([all_in]):
            self._answer_all(clock)
            if self._end.received is not None:
                raise ended_early(self._end.received.name)
            if clock.now_s() > timeout_s:
                if missing := self._missing():
                    raise CommError(*self._absent(missing, timeout_s))
                # The last rank has not published it, or a stranger has changed the count.
                self._store.set(all_in, "")
            if self._refused and clock.now_s() > self._refused_s + _REFUSED_S:
                wrong = sorted(set(self._missing()) & self._refused.keys())
                if wrong:
                    raise self._mismatch(wrong[0])
                self._refused.clear()
            time.sleep(_POLL_S)
        post_hosts(PrefixStore(self._name, self._store), self._hosts)
        self._publish_job(complete=True)
        # Who comes after this finds that the job is complete; who came just before waits for an answer.
        self._complete = True
        self._answer_all(clock)
        return self._name

    def dismiss(self, error: CommError) -> None:
        """Tells the other ranks why the job does not start, whether they have joined and wait in its
        first phase or have yet to be answered. The store may end with this process."""
        self._failure = str(error)
        agreement = Agreement(PrefixStore(self._name, self._store), self._topology, LINGER_S)
        with suppress(RuntimeError):
            agreement.post_fault(error)
            # Ranks that have their place wait for this.
            self._store.set(f"{LOBBY}/in/{self._name}/all", "")
            others = set(range(1, self._topology.world_size))
            joined, started = others - set(self._missing()), time.monotonic()
            early = isinstance(error, EndedEarlyError)
            limit_s = _EARLY_S if early else _DISMISS_S
            while (passed_s := time.monotonic() - started) < limit_s:
                self._send(self._answers(ActiveClock()))
                told = not early or others <= joined | self._answered
                if (
                    passed_s > LINGER_S
                    and told
                    and agreement.have_left(joined - self._leaving.keys())
                ):
                    return
                time.sleep(_POLL_S)

    def _missing(self) -> list[int]:
        return places_of(self._store, self._name, self._topology).missing()

    def _publish_job(self, *, complete: bool) -> None:
        job = {"job": self._job.to_table(), "complete": complete, "agent": self._agent_hosts}
        self._store.set(JOB, json.dumps(job))

    def _answer_all(self, clock: ActiveClock) -> None:
        self._send(self._answers(clock))
        if self._refuses:
            raise self._mismatch(self._refuses[0])
        for rank, name in self._leaving.items():
            raise ended_early(name, rank)

    def _answers(self, clock: ActiveClock) -> dict[str, str]:
        """To all greetings that have come since the last call, by key."""
        self._note_new(self._count())
        found = [self._answer(greeting, clock) for greeting in self._new_greetings()]
        return dict(filter(None, found))

    def _count(self) -> int:
        """How many greetings were announced. Repairs a counter that a stranger has overwritten."""
        text = peek(self._store, COUNT) or "0"
        if re.fullmatch(r"-?[0-9]{1,19}", text) and abs(int(text)) < _LARGEST_COUNT:
            return int(text)
        self._store.set(COUNT, "0")
        return 0

    def _note_new(self, count: int) -> None:
        """If a stranger has moved the counter, looks at the numbers before and after the jump only."""
        most = 2 * self._topology.world_size + 64
        if count != self._read:
            self._unread |= set(range(self._read + 1, min(count, self._read + most) + 1))
            self._unread |= set(range(max(count - most, min(self._read, count - 1)) + 1, count + 1))
            self._unread = set(sorted(self._unread)[-4 * most :])
        self._read = count

    def _new_greetings(self) -> list[bytes]:
        """In as few requests as possible. A greeting is counted first and written a moment later, or
        never, where its rank has died."""
        numbers = sorted(self._unread)
        keys = [f"{LOBBY}/greeting/{number}" for number in numbers]
        if keys and not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        if not keys:
            return []
        self._unread -= {int(key.rpartition("/")[2]) for key in keys}
        return list(self._store.multi_get(keys))

    def _answer(self, text: bytes, clock: ActiveClock) -> tuple[str, str] | None:
        """Key and answer; None for a greeting that no rank has written."""
        try:
            greeting = Greeting.parse(text)
        except ParseError:
            return None
        theirs, rank = greeting.job, greeting.rank
        conflict = self._job.conflict(theirs)
        if not conflict:
            self._answered.add(rank)
            # An agent's store also has greetings of earlier attempts.
            if greeting.leaves and greeting.restarts >= restart_count():
                self._leaving[rank] = greeting.leaves
        if self._complete and not conflict:
            conflict = COMPLETE
        answer: dict[str, Any] = {"refused": conflict, "job": self._job.to_table()}
        if self._failure and (not conflict or is_same(self._job, theirs)):
            answer = {"failed": f"rank 0: {self._failure}"}
        elif self._complete or self._failure:
            pass
        elif not conflict and not 0 < rank < self._topology.world_size:
            return None
        elif not conflict:
            self._hosts[rank] = greeting.at
            self.restarts = max(self.restarts, greeting.restarts)
            answer = {"name": self._name}
        elif not self._agent_hosts and self._job.same_id(theirs) is not False:
            # Perhaps a rank of this job that was started with other settings. In an agent's store it may
            # be one of an earlier attempt.
            self._refused[rank], self._refused_s = conflict, clock.now_s()
            if is_same(self._job, theirs):
                self._refuses.append(rank)
                answer = {"failed": f"rank 0: {self._mismatch(self._refuses[0])}"}
        return f"{LOBBY}/answer/{greeting.token}", json.dumps(answer)

    def _send(self, answers: Mapping[str, str]) -> None:
        if answers:
            self._store.multi_set(list(answers), list(answers.values()))  # type: ignore[attr-defined]

    def _mismatch(self, rank: int) -> CommError:
        return CommError(
            f"rank {rank} that came to {where_ranks_meet(self._topology)} is of another job or was "
            f"started otherwise: {self._refused[rank]} ('there' is rank 0)",
            "start all ranks of one job alike, and give each job a MASTER_PORT of its own",
        )

    def _absent(self, missing: Sequence[int], timeout_s: float) -> tuple[str, str]:
        return (
            f"{_by_node(missing, self._topology)} of {self._topology.world_size} did not come to "
            f"{where_ranks_meet(self._topology)} within {timeout_s:g} s",
            "look into their logs; comm.rendezvous_timeout_s sets the wait",
        )


class EndedEarlyError(CommError):
    """A rank was asked to end before all ranks had met."""


def ended_early(name: str, rank: int | None = None) -> EndedEarlyError:
    """`rank`: None for this one, whose number is added for the others."""
    who = "" if rank is None else f"rank {rank} "
    return EndedEarlyError(
        f"{who}was ended by {name} before all ranks had met", "start all ranks again"
    )


def _by_node(ranks: Sequence[int], topology: Topology) -> str:
    """`ranks 8 to 15 (all of node 1)`: hosts of ranks that never came are unknown, but ranks are
    numbered node by node, and nodes are alike where their size divides the number of ranks."""
    size, absent = topology.local_world_size, set(ranks)
    if size == 1 or topology.world_size % size:
        return format_ranks(ranks)
    nodes = [
        node
        for node in range(topology.world_size // size)
        if absent.issuperset(range(node * size, (node + 1) * size))
    ]
    if not nodes or topology.world_size == size:
        return format_ranks(ranks)
    named = format_ranks(nodes).replace("rank", "node")
    share = "all of" if len(nodes) * size == len(ranks) else "among them all of"
    return f"{format_ranks(ranks)} ({share} {named})"


def places_of(store: Store, name: str, topology: Topology) -> Attendance:
    return Attendance(store, f"{LOBBY}/in/{name}", topology.world_size)


def take_place(store: Store, name: str, topology: Topology) -> None:
    if places_of(store, name, topology).arrive(topology.rank):
        store.set(f"{LOBBY}/in/{name}/all", "")


def where_ranks_meet(topology: Topology) -> str:
    return f"{topology.master_addr}:{topology.master_port}"
