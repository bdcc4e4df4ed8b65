"""The rendezvous: ranks find one another at the address that the launcher names.

The result is a `Meeting`: a key-value store that exactly the ranks of this attempt share. Under
torchrun the agent hosts it, so it outlives a dying rank; elsewhere rank 0 does.

1. Rank 0 draws a name for this attempt, and publishes the identity of its job.
2. Every other rank publishes a greeting: its rank, its `JobIdentity` and a unique token.
3. Rank 0 answers each greeting with the attempt's name, or with the reason why that rank belongs to
   another job; a rank that is refused ends at once and never joins.
4. An accepted rank takes its place, which only one process can have. The rendezvous is complete when all
   places are taken.

An agent keeps its store when it restarts the ranks, with everything the last attempt wrote, and agents
on several nodes may count restarts differently. Greetings of dead ranks are answered too, but only live
ranks take their places. In an agent's store the published job may be that of an earlier attempt with
another number of ranks, so there only the job's id counts; a store hosted by rank 0 is always new.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, though not in __all__
from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.comm.agreement import ActiveClock
from paceline.comm.job import JobIdentity, RankHost, post_hosts, rank_hosts_store
from paceline.core.errors import CommError
from paceline.core.topology import Topology

_LOBBY = "paceline-lobby"
_JOB = f"{_LOBBY}/job"
_COUNT = f"{_LOBBY}/greetings"
_POLL_S = 0.02
_LAST_POLL_S = 0.3
_RETRY_S = 0.1
# Torch's own timeout comes first, where it works: its message says more.
_GRACE_S = 1.0
# Where no job id decides whether a rank with other settings belongs to this job, rank 0 waits so long for
# the right one after refusing the wrong one.
_REFUSED_S = 30.0
_LINGER_S = 1.0


@dataclass
class _Opened:
    """The store of this process at one address, and how many jobs have met there before."""

    store: Store
    address: str
    meetings: int = 0


# A program may run several jobs in a row, such as a training and an evaluation. Rank 0 keeps hosting the
# store; each further job has keys of its own in it. All ranks run the same jobs and so count alike.
_opened: dict[tuple[str, int], _Opened] = {}


@dataclass(frozen=True)
class Meeting:
    """`restarted`, on rank 0: the launcher has restarted the ranks of this job."""

    store: Store
    restarted: bool


def meet(
    topology: Topology, timeout_s: float, settings: Mapping[str, Any] | None = None
) -> Meeting:
    """Returns when all ranks have come, or fails with a line that names address, port and remedy."""
    where = f"{topology.master_addr}:{topology.master_port}"
    agent_hosts = not rank_hosts_store()
    hosts = topology.is_main and not agent_hosts
    job = JobIdentity.from_env(os.environ, topology, settings)
    try:
        with ActiveClock().ticking() as clock:
            store, address = _store_of_job(topology, hosts, timeout_s, clock)
            here = RankHost(job.host, address or topology.master_addr)
            if not topology.is_main:
                joining = _JoiningRank(store, topology, job, here)
                return Meeting(PrefixStore(joining.join(timeout_s, clock), store), False)
            # Only an agent's store can be older than this attempt.
            again = store.add(f"{_LOBBY}/attempts", 1) > 1 and agent_hosts
            coordinator = _Coordinator(store, topology, job, here, agent_hosts)
            name = coordinator.admit_all(timeout_s, clock)
            return Meeting(PrefixStore(name, store), again or coordinator.restarts > 0)
    except CommError:
        _opened.pop((topology.master_addr, topology.master_port), None)
        raise
    except (RuntimeError, ValueError, OSError) as error:
        _opened.pop((topology.master_addr, topology.master_port), None)
        raise CommError(*explain(where, topology, error, timeout_s)) from error


def _store_of_job(
    topology: Topology, hosts: bool, timeout_s: float, clock: ActiveClock
) -> tuple[Store, str]:
    """A store without keys of earlier jobs of this process, and this host's own address."""
    place = (topology.master_addr, topology.master_port)
    opened = _opened.get(place)
    if opened is None:
        address = "" if hosts else _await_host(topology, timeout_s, clock)
        opened = _Opened(_open_store(topology, hosts, timeout_s, clock), address)
        _opened[place] = opened
        return opened.store, opened.address
    opened.meetings += 1
    return PrefixStore(f"paceline-job-{opened.meetings}", opened.store), opened.address


def _await_host(topology: Topology, timeout_s: float, clock: ActiveClock) -> str:
    """Returns this host's own address once somebody listens at the job's.

    Torch would wait for that too, but reports a failure at great length.
    """
    while True:
        left_s = timeout_s - clock.now_s()
        try:
            address = (topology.master_addr, topology.master_port)
            with socket.create_connection(address, timeout=max(left_s, _RETRY_S)) as connection:
                return str(connection.getsockname()[0])
        except OSError:  # a name, too, may become known only when its host has started
            if left_s <= 0:
                raise
        time.sleep(_RETRY_S)


def _open_store(topology: Topology, hosts: bool, timeout_s: float, clock: ActiveClock) -> TCPStore:
    """Hosts the store, or connects to it.

    In a thread, because a program that listens at the address and never answers, such as another
    job's, keeps torch waiting beyond any timeout.
    """
    outcome: queue.SimpleQueue[TCPStore | Exception] = queue.SimpleQueue()

    def open_store() -> None:
        try:
            listener = _loopback_listener(topology) if hosts else None
            store = TCPStore(
                topology.master_addr,
                topology.master_port,
                is_master=hosts,
                timeout=timedelta(seconds=timeout_s),
                # The greetings do this, and they can name who is missing.
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listener,
            )
        except Exception as error:  # noqa: BLE001  (raised where the caller waits)
            outcome.put(error)
        else:
            outcome.put(store)

    threading.Thread(target=open_store, name="paceline-rendezvous", daemon=True).start()
    end_s = clock.now_s() + timeout_s + _GRACE_S
    while True:
        try:
            opened = outcome.get(timeout=_RETRY_S)
            break
        except queue.Empty:
            if clock.now_s() > end_s:
                raise TimeoutError(f"nothing answered within {timeout_s:g} s") from None
    if isinstance(opened, Exception):
        raise opened
    return opened


def _loopback_listener(topology: Topology) -> int | None:
    """A socket for ranks of one node that meet at its loopback address; None leaves it to torch, which
    listens on every address of the host. (A host's own name may stand for a loopback address on that
    host alone, so ranks on other nodes decide.)"""
    if topology.local_world_size < topology.world_size:
        return None
    found = socket.getaddrinfo(topology.master_addr, topology.master_port, type=socket.SOCK_STREAM)
    for family, _, _, _, address in found:
        if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            return None
        try:
            return socket.create_server(address[:2], family=family, backlog=1024).detach()
        except OSError as error:
            # `localhost` may stand for ::1 too, on a host without IPv6.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return None


def _restart_count() -> int:
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0


class _JoiningRank:
    """Any rank but 0."""

    def __init__(self, store: Store, topology: Topology, job: JobIdentity, here: RankHost) -> None:
        self._store, self._topology, self._job, self._here = store, topology, job, here

    def join(self, timeout_s: float, clock: ActiveClock) -> str:
        """The attempt's name, from rank 0, once this rank has its place in it."""
        token, rank = uuid.uuid4().hex, self._topology.rank
        greeting = {
            "token": token, "rank": rank, "restarts": _restart_count(),
            "at": list(self._here), "job": self._job.to_table(),
        }  # fmt: skip
        number = self._store.add(_COUNT, 1)
        self._store.set(f"{_LOBBY}/greeting/{number}", json.dumps(greeting))
        answer_key, pause_s = f"{_LOBBY}/answer/{token}", _POLL_S
        while not self._store.check([answer_key]):
            self._check_job()
            if clock.now_s() > timeout_s:
                raise TimeoutError("rank 0 did not answer")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LAST_POLL_S)
        answer = json.loads(self._store.get(answer_key))
        if "refused" in answer:
            raise self._refusal(JobIdentity.from_table(answer["job"]), answer["refused"])
        place = _place(answer["name"], rank)
        if self._store.compare_set(place, "", token).decode() != token:
            raise self._refusal(
                JobIdentity.from_table(answer["job"]), f"it has another process as rank {rank}"
            )
        return str(answer["name"])

    def _check_job(self) -> None:
        """Fails where the store is another job's, also one whose rank 0 answers no more."""
        if not self._store.check([_JOB]):
            return
        published = json.loads(self._store.get(_JOB))
        job = JobIdentity.from_table(published["job"])
        if published["agent"]:
            conflict = "their job ids differ" if job.same_id(self._job) is False else ""
        else:
            conflict = job.conflict(self._job)
            if not conflict and published["complete"]:
                conflict = "all of its ranks have joined already"
        if conflict:
            raise self._refusal(job, conflict)

    def _refusal(self, there: JobIdentity, conflict: str) -> CommError:
        rank, where = self._topology.rank, _where(self._topology)
        return CommError(
            f"rank {rank} has met another job at {where} ({conflict}): {there.describe()} is there, "
            f"{self._job.describe()} is here",
            "give each job a MASTER_PORT (torchrun: --master-port) of its own, or start all ranks of "
            "one job alike",
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
    ) -> None:
        self._store, self._topology, self._job = store, topology, job
        self._agent_hosts = agent_hosts
        self._name = uuid.uuid4().hex
        self._hosts = {0: here}
        # The largest restart count of any agent.
        self.restarts = _restart_count()
        self._read = 0
        self._unread: set[int] = set()
        self._refused: dict[int, str] = {}
        self._refused_s = 0.0

    def admit_all(self, timeout_s: float, clock: ActiveClock) -> str:
        """The attempt's name, once every rank has its place."""
        self._publish_job(complete=False)
        missing = set(range(1, self._topology.world_size))
        while missing:
            self._answer_all(clock)
            places = {rank for rank in missing if rank in self._hosts}
            missing -= {r for r in places if self._store.check([_place(self._name, r)])}
            if missing and clock.now_s() > timeout_s:
                raise CommError(*self._absent(missing, timeout_s))
            wrong = sorted(missing & self._refused.keys())
            if wrong and clock.now_s() > self._refused_s + _REFUSED_S:
                raise self._mismatch(wrong[0])
            if missing:
                time.sleep(_POLL_S)
        post_hosts(PrefixStore(self._name, self._store), self._hosts)
        self._publish_job(complete=True)
        return self._name

    def _publish_job(self, *, complete: bool) -> None:
        job = {"job": self._job.to_table(), "complete": complete, "agent": self._agent_hosts}
        self._store.set(_JOB, json.dumps(job))

    def _answer_all(self, clock: ActiveClock) -> None:
        came = self._store.add(_COUNT, 0)
        self._unread |= set(range(self._read + 1, came + 1))
        self._read = came
        for number in sorted(self._unread):
            key = f"{_LOBBY}/greeting/{number}"
            if self._store.check([key]):  # counted first, written a moment later
                self._unread.discard(number)
                self._answer(json.loads(self._store.get(key)), clock)

    def _answer(self, greeting: dict[str, Any], clock: ActiveClock) -> None:
        theirs, rank = JobIdentity.from_table(greeting["job"]), greeting["rank"]
        conflict = self._job.conflict(theirs)
        answer: dict[str, Any] = {"job": self._job.to_table()}
        answer |= {"refused": conflict} if conflict else {"name": self._name}
        self._store.set(f"{_LOBBY}/answer/{greeting['token']}", json.dumps(answer))
        if not conflict:
            self._hosts[rank] = RankHost(*greeting["at"])
            self.restarts = max(self.restarts, greeting["restarts"])
        elif not self._agent_hosts and self._job.same_id(theirs) is not False:
            # Perhaps a rank of this job that was started with other settings. In an agent's store it may
            # be one of an earlier attempt.
            self._refused[rank], self._refused_s = conflict, clock.now_s()
            if self._job.same_id(theirs) or self._job.settings == theirs.settings:
                # The store ends with this process, and that rank has yet to read the reason.
                time.sleep(_LINGER_S)
                raise self._mismatch(rank)

    def _mismatch(self, rank: int) -> CommError:
        return CommError(
            f"rank {rank} that came to {_where(self._topology)} is of another job or was started "
            f"otherwise: {self._refused[rank]} ('there' is rank 0)",
            "start all ranks of one job alike, and give each job a MASTER_PORT of its own",
        )

    def _absent(self, missing: set[int], timeout_s: float) -> tuple[str, str]:
        named = ", ".join(str(rank) for rank in sorted(missing)[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        return (
            f"rank {named}{more} of {self._topology.world_size} did not come to "
            f"{_where(self._topology)} within {timeout_s:g} s",
            "look into their logs; comm.rendezvous_timeout_s sets the wait",
        )


def _place(name: str, rank: int) -> str:
    return f"{_LOBBY}/in/{name}/{rank}"


def _where(topology: Topology) -> str:
    return f"{topology.master_addr}:{topology.master_port}"


def explain(
    where: str, topology: Topology, error: BaseException, timeout_s: float
) -> tuple[str, str]:
    """Cause and remedy of an error of torch's store."""
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
