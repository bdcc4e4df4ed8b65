"""The rendezvous: ranks find one another at the address that the launcher names.

The result is a `Meeting`: a key-value store that exactly the ranks of this attempt share. Under
torchrun the agent hosts it, so it outlives a dying rank; elsewhere rank 0 does.

1. Rank 0 draws a name for this attempt, and publishes the identity of its job.
2. Every other rank publishes a greeting: its rank, its `JobIdentity` and a unique token.
3. Rank 0 answers each greeting with the attempt's name, or with the reason why that rank belongs to
   another job; a rank that is refused ends at once and never joins.
4. An accepted rank takes its place, which only one process can have. The rendezvous is complete when all
   places are taken, which the last rank publishes.
5. A rank that a signal asks to end before that greets once more, to say so, and rank 0 tells the others.

Each rank makes nine requests to the store, and rank 0 reads and answers greetings in bulk.

An agent keeps its store when it restarts the ranks, with everything the last attempt wrote, and agents
on several nodes may count restarts differently. Greetings of dead ranks are answered too, but only live
ranks take their places. In an agent's store the published job may be that of an earlier attempt with
another number of ranks, so there only the job's id counts; a store hosted by rank 0 is always new.

Anybody who reaches the port can write to the store. What is read from it is checked, and greetings that
no rank has written are ignored; ranks without an answer greet again.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.comm.agreement import ActiveClock, AgreedError, Agreement, PeerError, came, peek
from paceline.comm.job import (
    Attendance,
    JobIdentity,
    RankHost,
    format_ranks,
    post_hosts,
    rank_hosts_store,
)
from paceline.comm.store import forget_store, store_of_job
from paceline.core.errors import CommError
from paceline.core.host import DeferredEnd, no_thread
from paceline.core.topology import Topology
from paceline.core.untrusted import ParseError, is_count, parse_table

_LOBBY = "paceline-lobby"
_JOB = f"{_LOBBY}/job"
_COUNT = f"{_LOBBY}/greetings"
_POLL_S = 0.02
# Torch may log a wait that ends without its key, so waits are long.
_WAIT_S = 30.0
_SIGNAL_WAIT_S = 1.0
# Where no job id decides whether a rank with other settings belongs to this job, rank 0 waits so long for
# the right one after refusing the wrong one.
_REFUSED_S = 30.0
_LINGER_S = 1.0
# For rank 0's answer to a rank of this job that it refuses.
_REFUSAL_WAIT_S = 5.0
# How long rank 0 stays after a rendezvous that failed, for ranks that have yet to read why.
_DISMISS_S = 3.0
# The same if a rank was asked to end while others may still start.
_EARLY_S = 5.0
# Of a greeting: many times what all settings take.
_LONGEST_GREETING = 1 << 20
_TOKEN = re.compile(r"[0-9a-f]{32}")
_SIGNAL = re.compile(r"(SIG[A-Z0-9]{1,12})?")
_LARGEST_COUNT = 1 << 62
_COMPLETE = "all of its ranks have joined already"


@dataclass(frozen=True)
class Meeting:
    """`restarted`, on rank 0: the launcher has restarted the ranks of this job."""

    store: Store
    restarted: bool


def meet(
    topology: Topology,
    timeout_s: float,
    settings: Mapping[str, Any] | None = None,
    lookups: ExitStack | None = None,
    end: DeferredEnd | None = None,
) -> Meeting:
    """Returns when all ranks have come, or fails with a line that names address, port and remedy. A rank
    that `end` is asked to end tells the others first.

    The store looks no host names up until `lookups` is closed, for the connections that follow; without
    it until this returns (`names_from_files`).
    """
    where = f"{topology.master_addr}:{topology.master_port}"
    agent_hosts = not rank_hosts_store()
    hosts = topology.is_main and not agent_hosts
    job = JobIdentity.from_env(os.environ, topology, settings)
    end = end or DeferredEnd(active=False)
    try:
        with ActiveClock().ticking() as clock, ExitStack() as own_lookups:
            lookups = lookups if lookups is not None else own_lookups
            store, address = store_of_job(topology, hosts, timeout_s, clock, lookups)
            here = RankHost(job.host, address or topology.master_addr)
            if not topology.is_main:
                joining = _JoiningRank(store, topology, job, here, end)
                meeting = Meeting(PrefixStore(joining.join(timeout_s, clock), store), False)
                return _met(meeting, topology, end)
            # Only an agent's store can be older than this attempt.
            again = store.add(f"{_LOBBY}/attempts", 1) > 1 and agent_hosts
            coordinator = _Coordinator(store, topology, job, here, agent_hosts, end)
            try:
                name = coordinator.admit_all(timeout_s, clock)
            except CommError as error:
                coordinator.dismiss(error)
                raise
            restarted = again or coordinator.restarts > 0
            return _met(Meeting(PrefixStore(name, store), restarted), topology, end)
    except CommError:
        forget_store(topology)
        raise
    except ParseError as error:
        forget_store(topology)
        raise CommError(
            f"rank {topology.rank} has read a message at {where} that no rank has written ({error})",
            "let only the ranks of the job reach MASTER_PORT, or choose another port",
        ) from error
    except (RuntimeError, ValueError, OSError) as error:
        forget_store(topology)
        raise CommError(*explain(where, topology, error, timeout_s)) from error


def _met(meeting: Meeting, topology: Topology, end: DeferredEnd) -> Meeting:
    """A signal that has come just now: the others wait for this rank in their first phase."""
    if end.received is not None:
        first = Agreement(meeting.store, topology, _LINGER_S)
        first.post_fault(ended_early(end.received.name))
    return meeting


def _restart_count() -> int:
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
            or not _TOKEN.fullmatch(token)
            or not is_count(rank)
            or not is_count(restarts)
            or at is None
            or not isinstance(leaves, str)
            or not _SIGNAL.fullmatch(leaves)
        ):
            raise ParseError("is no greeting")
        return cls(token, rank, restarts, at, job, leaves)


class _JoiningRank:
    """Any rank but 0."""

    def __init__(
        self, store: Store, topology: Topology, job: JobIdentity, here: RankHost, end: DeferredEnd
    ) -> None:
        self._store, self._topology, self._job, self._here = store, topology, job, here
        self._end = end
        # A signal is seen between two waits.
        self._wait_s = _SIGNAL_WAIT_S if end.active else _WAIT_S

    def join(self, timeout_s: float, clock: ActiveClock) -> str:
        """The attempt's name, from rank 0, once this rank has its place in it."""
        token, rank = uuid.uuid4().hex, self._topology.rank
        greeting = {
            "token": token, "rank": rank, "restarts": _restart_count(),
            "at": list(self._here), "job": self._job.to_table(),
        }  # fmt: skip
        self._leave_if_asked(greeting)
        self._greet(greeting)
        answer_key = f"{_LOBBY}/answer/{token}"
        try:
            self._check_job()
        except _StartedOtherwiseError as refusal:
            # Rank 0 fails for the same reason; then this rank has the line that all others have.
            if not came(self._store, answer_key, _REFUSAL_WAIT_S):
                raise
            answer = parse_table(peek(self._store, answer_key))
            if "failed" in answer:
                raise PeerError.from_agreed(
                    AgreedError(str(answer["failed"]), refusal.exit_code)
                ) from refusal
            raise
        while not came(self._store, answer_key, min(self._wait_s, timeout_s)):
            self._check_job()
            self._leave_if_asked(greeting)
            if clock.now_s() > timeout_s:
                raise TimeoutError("rank 0 did not answer")
            self._greet(greeting)  # a stranger may have hidden the first one
        answer = parse_table(peek(self._store, answer_key))
        if "failed" in answer:
            raise PeerError.from_agreed(AgreedError(str(answer["failed"]), CommError("").exit_code))
        if "refused" in answer:
            raise self._refusal(JobIdentity.from_table(answer.get("job")), str(answer["refused"]))
        name = answer.get("name")
        if not isinstance(name, str) or not _TOKEN.fullmatch(name):
            raise ParseError("is no answer")
        place = f"{_LOBBY}/in/{name}/{rank}"
        if self._store.compare_set(place, "", token).decode() != token:
            there = JobIdentity.from_table(parse_table(self._store.get(_JOB)).get("job"))
            raise self._refusal(there, f"it has another process as rank {rank}")
        _take_place(self._store, name, self._topology)
        # What goes wrong from here on is found by the agreement that follows.
        with suppress(DistNetworkError):
            while self._end.active and clock.now_s() <= timeout_s:
                if came(self._store, f"{_LOBBY}/in/{name}/all", min(self._wait_s, timeout_s)):
                    break
                self._leave_if_asked(greeting)
        return name

    def _greet(self, greeting: Mapping[str, Any]) -> None:
        number = self._store.add(_COUNT, 1)
        self._store.set(f"{_LOBBY}/greeting/{number}", json.dumps(greeting))

    def _leave_if_asked(self, greeting: Mapping[str, Any]) -> None:
        """Tells rank 0 about a signal, which tells the others."""
        if self._end.received is not None:
            self._greet({**greeting, "leaves": self._end.received.name})
            raise ended_early(self._end.received.name)

    def _check_job(self) -> None:
        """Fails where the store is another job's, also one whose rank 0 answers no more."""
        text = peek(self._store, _JOB)
        if not text:
            return
        try:
            published = parse_table(text)
            job = JobIdentity.from_table(published.get("job"))
        except ParseError:  # a stranger's; the answer decides
            return
        agent, complete = published.get("agent") is True, published.get("complete") is True
        if agent:
            conflict = "their job ids differ" if job.same_id(self._job) is False else ""
        else:
            conflict = job.conflict(self._job)
            if not conflict and complete:
                conflict = _COMPLETE
        if conflict:
            refusal = self._refusal(job, conflict)
            if not agent and not complete and _is_same(job, self._job):
                raise _StartedOtherwiseError(refusal.cause, refusal.remedy)
            raise refusal

    def _refusal(self, there: JobIdentity, conflict: str) -> CommError:
        rank, where = self._topology.rank, _where(self._topology)
        return CommError(
            f"rank {rank} has met another job at {where} ({conflict}): {there.describe()} is there, "
            f"{self._job.describe()} is here",
            "give each job a MASTER_PORT (torchrun: --master-port) of its own, or start all ranks of "
            "one job alike",
        )


class _StartedOtherwiseError(CommError):
    """A rank that belongs to the job beyond doubt, and yet cannot join it."""


def _is_same(job: JobIdentity, other: JobIdentity) -> bool:
    """Whether both are ranks of one job beyond doubt, however they were started."""
    return bool(job.same_id(other)) or (
        job.same_id(other) is None and job.settings == other.settings
    )


class _Coordinator:
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
        self.restarts = _restart_count()
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
        all_in = f"{_LOBBY}/in/{self._name}/all"
        _take_place(self._store, self._name, self._topology)
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
        agreement = Agreement(PrefixStore(self._name, self._store), self._topology, _LINGER_S)
        with suppress(RuntimeError):
            agreement.post_fault(error)
            # Ranks that have their place wait for this.
            self._store.set(f"{_LOBBY}/in/{self._name}/all", "")
            others = set(range(1, self._topology.world_size))
            joined, started = others - set(self._missing()), time.monotonic()
            early = isinstance(error, EndedEarlyError)
            limit_s = _EARLY_S if early else _DISMISS_S
            while (passed_s := time.monotonic() - started) < limit_s:
                self._send(self._answers(ActiveClock()))
                told = not early or others <= joined | self._answered
                if (
                    passed_s > _LINGER_S
                    and told
                    and agreement.have_left(joined - self._leaving.keys())
                ):
                    return
                time.sleep(_POLL_S)

    def _missing(self) -> list[int]:
        return _places(self._store, self._name, self._topology).missing()

    def _publish_job(self, *, complete: bool) -> None:
        job = {"job": self._job.to_table(), "complete": complete, "agent": self._agent_hosts}
        self._store.set(_JOB, json.dumps(job))

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
        text = peek(self._store, _COUNT) or "0"
        if re.fullmatch(r"-?[0-9]{1,19}", text) and abs(int(text)) < _LARGEST_COUNT:
            return int(text)
        self._store.set(_COUNT, "0")
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
        keys = [f"{_LOBBY}/greeting/{number}" for number in numbers]
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
            if greeting.leaves and greeting.restarts >= _restart_count():
                self._leaving[rank] = greeting.leaves
        if self._complete and not conflict:
            conflict = _COMPLETE
        answer: dict[str, Any] = {"refused": conflict, "job": self._job.to_table()}
        if self._failure and (not conflict or _is_same(self._job, theirs)):
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
            if _is_same(self._job, theirs):
                self._refuses.append(rank)
                answer = {"failed": f"rank 0: {self._mismatch(self._refuses[0])}"}
        return f"{_LOBBY}/answer/{greeting.token}", json.dumps(answer)

    def _send(self, answers: Mapping[str, str]) -> None:
        if answers:
            self._store.multi_set(list(answers), list(answers.values()))  # type: ignore[attr-defined]

    def _mismatch(self, rank: int) -> CommError:
        return CommError(
            f"rank {rank} that came to {_where(self._topology)} is of another job or was started "
            f"otherwise: {self._refused[rank]} ('there' is rank 0)",
            "start all ranks of one job alike, and give each job a MASTER_PORT of its own",
        )

    def _absent(self, missing: Sequence[int], timeout_s: float) -> tuple[str, str]:
        return (
            f"{_by_node(missing, self._topology)} of {self._topology.world_size} did not come to "
            f"{_where(self._topology)} within {timeout_s:g} s",
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


def _places(store: Store, name: str, topology: Topology) -> Attendance:
    return Attendance(store, f"{_LOBBY}/in/{name}", topology.world_size)


def _take_place(store: Store, name: str, topology: Topology) -> None:
    if _places(store, name, topology).arrive(topology.rank):
        store.set(f"{_LOBBY}/in/{name}/all", "")


def _where(topology: Topology) -> str:
    return f"{topology.master_addr}:{topology.master_port}"


def explain(
    where: str, topology: Topology, error: BaseException, timeout_s: float
) -> tuple[str, str]:
    """Cause and remedy of an error of torch's store."""
    if known := no_thread(error):
        return known.cause, known.remedy
    text = str(error).lower()
    if "in use" in text or "eaddrinuse" in text:
        return (
            f"rank {topology.rank} cannot host the rendezvous: {where} is in use",
            "end the other job or set MASTER_PORT (torchrun: --master-port) to a free port",
        )
    if "permission denied" in text:
        return (
            f"rank {topology.rank} may not listen on {where}",
            "set MASTER_PORT to a port above 1024",
        )
    if isinstance(error, socket.gaierror) or "resolve" in text or "getaddrinfo" in text:
        return (f"the host of {where} cannot be resolved", "set MASTER_ADDR to rank 0's address")
    if isinstance(error, ValueError):
        return (f"{where} is not an address of a rendezvous", "set MASTER_ADDR and MASTER_PORT")
    return (
        f"rank {topology.rank} did not meet the others at {where} within {timeout_s:g} s",
        "check that rank 0 runs, that MASTER_ADDR and MASTER_PORT are its own, and the firewall",
    )
