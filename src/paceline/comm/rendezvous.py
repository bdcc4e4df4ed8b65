"""The rendezvous: ranks meet at the address that the launcher names.

The result is a `Meeting`: a key-value store that exactly the ranks of this attempt to start the job
share. Under torchrun the agent hosts the store, which so outlives a failed rank; otherwise rank 0 hosts
the store.

1. Rank 0 draws a random name for this attempt, and publishes the identity of its job.
2. Every other rank sends a greeting: its rank, its `JobIdentity` and a unique token.
3. Rank 0 answers each greeting with the attempt's name, or with the reason why that rank belongs to
   another job. A refused rank ends at once and never joins.
4. An accepted rank registers in the store; only one process can register as this rank. When the last
   rank registers, it publishes that the rendezvous is complete.
5. If a signal asks a rank to end before the rendezvous is complete, the rank sends another greeting with
   the signal, and rank 0 tells the other ranks.

When a torchrun agent restarts the ranks, it keeps the store with all keys of the last attempt. Agents on
several nodes might count restarts differently. Rank 0 also answers greetings of ended processes, but only
running ranks register. In an agent's store the published job can be of an earlier attempt with a
different number of ranks. So ranks there only compare the job's id. A store of rank 0 is always new.

Every process that reaches the port can write to the store. Values that are read from the store are
checked, and invalid greetings are ignored. A rank without an answer sends another greeting.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from torch.distributed import DistNetworkError
from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.comm.agreement import ActiveClock, Agreement, came, peek
from paceline.comm.coordinator import (
    COMPLETE,
    GREETINGS,
    JOB,
    LINGER_S,
    LOBBY,
    TOKEN,
    Coordinator,
    ended_early,
    restart_count,
    take_place,
    where_ranks_meet,
)
from paceline.comm.job import JobIdentity, RankHost, rank_hosts_store
from paceline.comm.peer_errors import AgreedError, PeerError
from paceline.comm.store import forget_store, store_of_job
from paceline.core.errors import CommError
from paceline.core.host import DeferredEnd, no_thread
from paceline.core.topology import Topology
from paceline.core.untrusted import ParseError, parse_table

# Length of one wait for a key. Torch may log a wait that ends before the key exists, so waits are long.
_WAIT_S = 30.0
_SIGNAL_WAIT_S = 1.0


@dataclass(frozen=True)
class Meeting:
    """The result of the rendezvous: the store that the ranks of this start of the job share.

    `restarted` is True if the launcher has started the ranks before.
    """

    store: Store
    # True on rank 0 if the launcher has restarted the ranks of this job.
    restarted: bool


def meet(
    topology: Topology,
    timeout_s: float,
    settings: Mapping[str, Any] | None = None,
    lookups: ExitStack | None = None,
    end: DeferredEnd | None = None,
) -> Meeting:
    """Waits until all ranks have joined the rendezvous.

    Args:
        topology: This rank, and the address of the rendezvous.
        timeout_s: How long to wait for the other ranks.
        settings: Settings that are equal on all ranks of the job, to recognize ranks of another job.
        lookups: A stack onto which the function puts `names_from_files`, so that DNS lookups stay
            disabled until the caller closes the stack. If None, lookups are disabled until this
            function returns.
        end: Records a signal that asks this rank to end. Before it ends, the rank tells the other
            ranks.

    Returns:
        The key-value store that the ranks share.

    Raises:
        CommError: If a rank does not come in time, belongs to another job or was asked to end.
    """
    where = where_ranks_meet(topology)
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
            again = store.add(f"{LOBBY}/attempts", 1) > 1 and agent_hosts
            coordinator = Coordinator(store, topology, job, here, agent_hosts, end)
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
            f"rank {topology.rank} has read an invalid message at {where} ({error})",
            "make sure that only the ranks of the job can reach MASTER_PORT, or choose another port",
        ) from error
    except (RuntimeError, ValueError, OSError) as error:
        forget_store(topology)
        raise CommError(*explain(where, topology, error, timeout_s)) from error


def _met(meeting: Meeting, topology: Topology, end: DeferredEnd) -> Meeting:
    """Returns `meeting`. If a signal has asked this rank to end, posts an error for the others.

    The other ranks read this error in the first phase after the rendezvous.
    """
    if end.received is not None:
        first = Agreement(meeting.store, topology, LINGER_S)
        first.post_fault(ended_early(end.received.name))
    return meeting


class _JoiningRank:
    """The rendezvous as seen by a rank other than 0."""

    def __init__(
        self, store: Store, topology: Topology, job: JobIdentity, here: RankHost, end: DeferredEnd
    ) -> None:
        self._store, self._topology, self._job, self._here = store, topology, job, here
        self._end = end
        # Signals are only checked between two waits.
        self._wait_s = _SIGNAL_WAIT_S if end.active else _WAIT_S

    def join(self, timeout_s: float, clock: ActiveClock) -> str:
        """Joins the rendezvous, and returns rank 0's name for this attempt to start the job."""
        token, rank = uuid.uuid4().hex, self._topology.rank
        greeting = {
            "token": token, "rank": rank, "restarts": restart_count(),
            "at": list(self._here), "job": self._job.to_table(),
        }  # fmt: skip
        answer_key = f"{LOBBY}/answer/{token}"
        self._leave_if_asked(greeting)
        self._greet(greeting)
        self._check_job()
        while not came(self._store, answer_key, min(self._wait_s, timeout_s)):
            self._check_job()
            self._leave_if_asked(greeting)
            if clock.now_s() > timeout_s:
                raise TimeoutError("rank 0 did not answer")
            self._greet(greeting)  # a foreign process may have removed the first greeting
        answer = parse_table(peek(self._store, answer_key))
        if "failed" in answer:
            raise PeerError.from_agreed(AgreedError(str(answer["failed"]), CommError("").exit_code))
        if "refused" in answer:
            raise self._refusal(JobIdentity.from_table(answer.get("job")), str(answer["refused"]))
        name = answer.get("name")
        if not isinstance(name, str) or not TOKEN.fullmatch(name):
            raise ParseError("is no answer")
        place = f"{LOBBY}/in/{name}/{rank}"
        if self._store.compare_set(place, "", token).decode() != token:
            there = JobIdentity.from_table(parse_table(self._store.get(JOB)).get("job"))
            raise self._refusal(there, f"it has another process as rank {rank}")
        take_place(self._store, name, self._topology)
        # Errors from here on are found in the first phase after the rendezvous.
        with suppress(DistNetworkError):
            while self._end.active and clock.now_s() <= timeout_s:
                if came(self._store, f"{LOBBY}/in/{name}/all", min(self._wait_s, timeout_s)):
                    break
                self._leave_if_asked(greeting)
        return name

    def _greet(self, greeting: Mapping[str, Any]) -> None:
        self._store.queue_push(GREETINGS, json.dumps(greeting))

    def _leave_if_asked(self, greeting: Mapping[str, Any]) -> None:
        """If a signal has asked this rank to end, tells rank 0 and raises EndedEarlyError."""
        if self._end.received is not None:
            self._greet({**greeting, "leaves": self._end.received.name})
            raise ended_early(self._end.received.name)

    def _check_job(self) -> None:
        """Raises CommError if the store belongs to another job.

        This check does not need an answer of that job's rank 0.
        """
        text = peek(self._store, JOB)
        if not text:
            return
        try:
            published = parse_table(text)
            job = JobIdentity.from_table(published.get("job"))
        except ParseError:  # written by a foreign process; rank 0's answer decides
            return
        if published.get("agent") is True:
            conflict = "their job ids differ" if job.same_id(self._job) is False else ""
        else:
            conflict = job.conflict(self._job)
            if not conflict and published.get("complete") is True:
                conflict = COMPLETE
        if conflict:
            raise self._refusal(job, conflict)

    def _refusal(self, there: JobIdentity, conflict: str) -> CommError:
        rank, where = self._topology.rank, where_ranks_meet(self._topology)
        return CommError(
            f"rank {rank} has met another job at {where} ({conflict}): {there.describe()} is there, "
            f"{self._job.describe()} is here",
            "give each job its own MASTER_PORT (torchrun: --master-port), or start all ranks of a job "
            "with the same settings",
        )


def explain(
    where: str, topology: Topology, error: BaseException, timeout_s: float
) -> tuple[str, str]:
    """Returns the cause and the remedy to show for an exception of torch's store."""
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
        f"rank {topology.rank} did not meet the other ranks at {where} within {timeout_s:g} s",
        "check that rank 0 runs, that MASTER_ADDR and MASTER_PORT are those of rank 0, and the firewall",
    )
