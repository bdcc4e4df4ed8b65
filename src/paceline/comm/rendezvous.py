"""The rendezvous: ranks find one another at the address that the launcher names.

In: a `Topology`. Out: a `Meeting`: a key-value store that all ranks of this attempt share, and no
others. Under torchrun the agent hosts it, so it outlives a dying rank; elsewhere rank 0 does.

1. Rank 0 draws a name for this attempt at the job.
2. Every other rank leaves a greeting under its rank, with a word that nobody else has.
3. Rank 0 answers each greeting with the attempt's name, until all have come in.

An agent keeps its store when it starts ranks anew, with all that the last attempt left in it, and
agents on several nodes do not count their attempts alike. A greeting of a rank that is dead is
answered too, but only the living come in; and two jobs that meet at one port by mistake stay apart.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, though not in __all__
from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.core.errors import CommError
from paceline.core.topology import Topology

_LOBBY = "paceline-lobby"
_POLL_S = 0.02
_RETRY_S = 0.1
# Torch's own timeout comes first, where it works: its words tell more.
_GRACE_S = 1.0


@dataclass(frozen=True)
class Meeting:
    """`restarted`, on rank 0: the launcher has run this job before, and its ranks start anew."""

    store: Store
    restarted: bool


def meet(topology: Topology, timeout_s: float) -> Meeting:
    """Returns when all ranks have come, or fails with a line that names address, port and remedy."""
    where = f"{topology.master_addr}:{topology.master_port}"
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = topology.is_main and not agent_hosts
    try:
        if not hosts:
            _await_host(topology, timeout_s)
        store = _open_store(topology, hosts, timeout_s)
        if not topology.is_main:
            return Meeting(PrefixStore(_come_in(store, topology.rank, timeout_s), store), False)
        # Only an agent's store can be older than this attempt.
        again = store.add(f"{_LOBBY}/attempts", 1) > 1 and agent_hosts
        name, counts = _welcome(store, topology, timeout_s)
        return Meeting(PrefixStore(name, store), again or max(counts) > 0)
    except CommError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        raise CommError(*explain(where, topology, error, timeout_s)) from error


def _await_host(topology: Topology, timeout_s: float) -> None:
    """Returns once somebody listens at the address.

    Torch would wait for that too, but says in pages of its own that nobody came.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            address = (topology.master_addr, topology.master_port)
            socket.create_connection(address, timeout=max(left_s, _RETRY_S)).close()
        except OSError:  # a name, too, may become known only when its host has started
            if left_s <= 0:
                raise
        else:
            return
        time.sleep(_RETRY_S)


def _open_store(topology: Topology, hosts: bool, timeout_s: float) -> TCPStore:
    """Hosts the store, or connects to it.

    In a thread, because a program that listens at the address and never answers, such as another
    job's, keeps torch waiting beyond any timeout.
    """
    outcome: queue.SimpleQueue[TCPStore | Exception] = queue.SimpleQueue()

    def open_store() -> None:
        try:
            store = TCPStore(
                topology.master_addr,
                topology.master_port,
                is_master=hosts,
                timeout=timedelta(seconds=timeout_s),
                # The greetings do this, and they can name who is missing.
                wait_for_workers=False,
                multi_tenant=True,
            )
        except Exception as error:  # noqa: BLE001  (raised where the caller waits)
            outcome.put(error)
        else:
            outcome.put(store)

    threading.Thread(target=open_store, name="paceline-rendezvous", daemon=True).start()
    try:
        opened = outcome.get(timeout=timeout_s + _GRACE_S)
    except queue.Empty:
        raise TimeoutError(f"nothing answered within {timeout_s:g} s") from None
    if isinstance(opened, Exception):
        raise opened
    return opened


def _restart_count() -> int:
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0


def _come_in(store: Store, rank: int, timeout_s: float) -> str:
    """The attempt's name, from rank 0."""
    word = uuid.uuid4().hex
    store.set(f"{_LOBBY}/greeting/{rank}", f"{word} {_restart_count()}")
    answer = f"{_LOBBY}/answer/{word}"
    store.wait([answer], timedelta(seconds=timeout_s))
    name = store.get(answer).decode()
    store.set(f"{_LOBBY}/in/{name}/{rank}", "")
    return name


def _welcome(store: Store, topology: Topology, timeout_s: float) -> tuple[str, list[int]]:
    """The attempt's name, and how often each rank's agent says that it has started it anew."""
    name = uuid.uuid4().hex
    greetings: dict[int, str] = {0: f"- {_restart_count()}"}
    missing = set(range(1, topology.world_size))
    deadline = time.monotonic() + timeout_s
    while missing:
        for rank in sorted(missing):
            if store.check([f"{_LOBBY}/in/{name}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"{_LOBBY}/greeting/{rank}"]):
                greeting = store.get(f"{_LOBBY}/greeting/{rank}").decode()
                if greetings.get(rank) != greeting:
                    greetings[rank] = greeting
                    store.set(f"{_LOBBY}/answer/{greeting.split()[0]}", name)
        if missing and time.monotonic() > deadline:
            raise CommError(*_absent(topology, missing, timeout_s))
        if missing:
            time.sleep(_POLL_S)
    return name, [int(greeting.split()[1]) for greeting in greetings.values()]


def _absent(topology: Topology, missing: set[int], timeout_s: float) -> tuple[str, str]:
    named = ", ".join(str(rank) for rank in sorted(missing)[:8])
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return (
        f"rank {named}{more} of {topology.world_size} did not come to {topology.master_addr}:"
        f"{topology.master_port} within {timeout_s:g} s",
        "look into their logs; comm.rendezvous_timeout_s sets the wait",
    )


def explain(
    where: str, topology: Topology, error: BaseException, timeout_s: float
) -> tuple[str, str]:
    """Cause and remedy for what torch reports in its own, longer words."""
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
