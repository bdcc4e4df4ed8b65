"""Rank 0's side of a rendezvous: answers the ranks that connect, and waits until all have joined."""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch.distributed import QueueEmptyError
from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.comm.agreement import ActiveClock, Agreement
from paceline.comm.job import Attendance, JobIdentity, RankHost, format_ranks, post_hosts
from paceline.core.errors import CommError
from paceline.core.host import DeferredEnd
from paceline.core.topology import Topology
from paceline.core.untrusted import ParseError, is_count, parse_table

LOBBY = "paceline-lobby"
JOB = f"{LOBBY}/job"
GREETINGS = f"{LOBBY}/greetings"
_POLL_S = 0.02
# After rank 0 has refused a rank whose job has no id, it waits this long for the right rank.
_REFUSED_S = 30.0
LINGER_S = 1.0
# How long rank 0 waits after a failed rendezvous, so that other ranks can read the reason.
_DISMISS_S = 3.0
# The same limit if a signal asked a rank to end while other ranks might still start.
_EARLY_S = 5.0
# Limit for a greeting in bytes; far more than all settings of a job take.
_LONGEST_GREETING = 1 << 20
TOKEN = re.compile(r"[0-9a-f]{32}")
_SIGNAL = re.compile(r"(SIG[A-Z0-9]{1,12})?")
COMPLETE = "all of its ranks have joined already"


def restart_count() -> int:
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0


class Greeting(NamedTuple):
    """The message with which a rank asks rank 0 to join the job."""

    token: str
    rank: int
    restarts: int
    at: RankHost
    job: JobIdentity
    # The signal that asked the rank to end, or "".
    leaves: str

    @classmethod
    def parse(cls, text: bytes) -> Greeting:
        """Parses a greeting. Raises ParseError if no rank can have written the text."""
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


class Coordinator:
    """Rank 0's part in starting a job: it waits for the other ranks. Only rank 0 creates it.

    The same job can be started several times, for example if torchrun restarts it after a failure.
    Each such attempt has a random name, which keeps its keys in the store apart from those of earlier
    attempts.
    """

    def __init__(
        self,
        store: Store,
        topology: Topology,
        job: JobIdentity,
        here: RankHost,
        agent_hosts: bool,
        end: DeferredEnd,
    ) -> None:
        self._store, self._topology, self._job = store, topology, job
        self._agent_hosts, self._end = agent_hosts, end
        self._name = uuid.uuid4().hex
        self._hosts = {0: here}
        # The largest restart count of any agent.
        self.restarts = restart_count()
        self._complete = False
        self._failure = ""
        # The signal of each rank that was asked to end before all ranks had joined.
        self._leaving: dict[int, str] = {}
        self._answered: set[int] = set()
        # The reason for each refused rank that might belong to this job, and the time of the last
        # refusal.
        self._refused: dict[int, str] = {}
        self._refused_s = 0.0

    def admit_all(self, timeout_s: float, clock: ActiveClock) -> str:
        """Waits until every rank has joined, and returns the random name of this attempt."""
        self._publish_job()
        all_in = f"{LOBBY}/in/{self._name}/all"
        take_place(self._store, self._name, self._topology)
        # Rank 0 polls, because it waits for greetings and for the last rank at the same time.
        while not self._store.check([all_in]):
            self._answer_all(clock)
            if self._end.received is not None:
                raise ended_early(self._end.received.name)
            if clock.now_s() > timeout_s:
                if missing := self._missing():
                    raise self._absent(missing, timeout_s)
                # All ranks are in, but the key is missing: a foreign process has changed the count, or
                # the last rank has not set the key.
                self._store.set(all_in, "")
            if self._refused and clock.now_s() > self._refused_s + _REFUSED_S:
                for rank in self._missing():
                    if rank in self._refused:
                        raise self._mismatch(rank)
                self._refused.clear()
            time.sleep(_POLL_S)
        post_hosts(PrefixStore(self._name, self._store), self._hosts)
        # Ranks that come from now on read that the job is complete. A rank that has already sent a
        # greeting still waits for an answer.
        self._complete = True
        self._publish_job()
        self._answer_all(clock)
        return self._name

    def dismiss(self, error: CommError) -> None:
        """Tells the other ranks why the job does not start.

        The other ranks wait for an answer to their greeting, or for all ranks to join. Rank 0 waits a
        few seconds for them to read the error, because the store might end with this process.
        """
        self._failure = str(error)
        agreement = Agreement(PrefixStore(self._name, self._store), self._topology, LINGER_S)
        with suppress(RuntimeError):
            agreement.post_fault(error)
            # Ranks that have joined wait for this key.
            self._store.set(f"{LOBBY}/in/{self._name}/all", "")
            others = set(range(1, self._topology.world_size))
            joined, started = others - set(self._missing()), time.monotonic()
            early = isinstance(error, EndedEarlyError)
            limit_s = _EARLY_S if early else _DISMISS_S
            while (passed_s := time.monotonic() - started) < limit_s:
                self._answer_all(ActiveClock())
                informed = not early or others <= joined | self._answered
                waits = joined - self._leaving.keys() - agreement.left()
                if passed_s > LINGER_S and informed and not waits:
                    return
                time.sleep(_POLL_S)

    def _missing(self) -> list[int]:
        return places_of(self._store, self._name, self._topology).missing()

    def _publish_job(self) -> None:
        job = {
            "job": self._job.to_table(), "complete": self._complete, "agent": self._agent_hosts,
        }  # fmt: skip
        self._store.set(JOB, json.dumps(job))

    def _answer_all(self, clock: ActiveClock) -> None:
        """Answers the greetings that have arrived since the last call.

        Raises:
            EndedEarlyError: If a signal asked one of the ranks to end.
        """
        answers: dict[str, str] = {}
        # A foreign process might fill or empty the queue. Ranks without an answer send another greeting.
        waiting = min(self._store.queue_len(GREETINGS), 2 * self._topology.world_size + 64)
        for _ in range(waiting):
            with suppress(ParseError, QueueEmptyError):
                greeting = Greeting.parse(self._store.queue_pop(GREETINGS, False))
                if (answer := self._answer(greeting, clock)) is not None:
                    answers[f"{LOBBY}/answer/{greeting.token}"] = json.dumps(answer)
        if answers:
            self._store.multi_set(list(answers), list(answers.values()))  # type: ignore[attr-defined]
        if not self._failure:
            # This includes ranks that have already joined.
            for rank, name in self._leaving.items():
                raise ended_early(name, rank)

    def _answer(self, greeting: Greeting, clock: ActiveClock) -> dict[str, Any] | None:
        rank = greeting.rank
        conflict = self._job.conflict(greeting.job)
        if not conflict:
            self._answered.add(rank)
            # The store of a torchrun agent can also contain greetings of earlier attempts.
            if greeting.leaves and greeting.restarts >= restart_count():
                self._leaving[rank] = greeting.leaves
            if self._failure:
                return {"failed": f"rank 0: {self._failure}"}
            if not self._complete:
                if not 0 < rank < self._topology.world_size:
                    return None
                self._hosts[rank] = greeting.at
                self.restarts = max(self.restarts, greeting.restarts)
                return {"name": self._name}
        elif not self._agent_hosts and self._job.same_id(greeting.job) is not False:
            # The rank might belong to this job but have different settings. In the store of a torchrun
            # agent, the greeting might be of an earlier attempt and is not recorded.
            self._refused[rank], self._refused_s = conflict, clock.now_s()
        return {"refused": conflict or COMPLETE, "job": self._job.to_table()}

    def _mismatch(self, rank: int) -> CommError:
        return CommError(
            f"rank {rank} that came to {where_ranks_meet(self._topology)} belongs to another job or has "
            f"other settings: {self._refused[rank]} ('there' is rank 0)",
            "start all ranks of a job with the same settings, and give each job its own MASTER_PORT",
        )

    def _absent(self, missing: Sequence[int], timeout_s: float) -> CommError:
        return CommError(
            f"{format_ranks(missing)} of {self._topology.world_size} did not come to "
            f"{where_ranks_meet(self._topology)} within {timeout_s:g} s",
            "look into their logs; comm.rendezvous_timeout_s sets the wait",
        )


class EndedEarlyError(CommError):
    """Raised if a signal asked a rank to end before all ranks had joined the rendezvous."""


def ended_early(name: str, rank: int | None = None) -> EndedEarlyError:
    """Returns the error for a rank that the signal `name` asked to end.

    Args:
        name: The name of the signal.
        rank: The rank that was asked to end, or None for this rank.
    """
    who = "" if rank is None else f"rank {rank} "
    return EndedEarlyError(
        f"{who}was ended by {name} before all ranks had met", "start all ranks again"
    )


def places_of(store: Store, name: str, topology: Topology) -> Attendance:
    return Attendance(store, f"{LOBBY}/in/{name}", topology.world_size)


def take_place(store: Store, name: str, topology: Topology) -> None:
    if places_of(store, name, topology).arrive(topology.rank):
        store.set(f"{LOBBY}/in/{name}/all", "")


def where_ranks_meet(topology: Topology) -> str:
    return f"{topology.master_addr}:{topology.master_port}"
