"""Opens the rendezvous store of this process: hosts it, or connects to it.

The store is torch's `TCPStore` at the address that the launcher names. A process opens the store only
once, also if it runs several jobs. Failures raise exceptions of torch or of the socket layer;
`rendezvous.explain` describes them.

For its log, `TCPStore` looks up the host name of every peer: the client for its connection, and the
server, which has only one thread, for each accepted connection. If the name server does not answer, each
lookup takes seconds; a rendezvous of 256 ranks took a minute. `names_from_files` prevents these lookups.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import queue
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, though not in __all__
from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.comm.agreement import ActiveClock
from paceline.core.topology import Topology

_RETRY_S = 0.1
# Torch's own timeout should come first, because its error message is more precise.
_GRACE_S = 1.0
_BACKLOG = 8192


@dataclass
class _Opened:
    """The open store of this process, and the number of jobs of this process that have used it."""

    store: Store
    address: str
    meetings: int = 0


# A program may run several jobs in a row, such as a training and an evaluation. Rank 0 keeps hosting the
# store, and each further job uses its own prefix for keys. All ranks run the same jobs in the same order,
# so they use the same prefixes.
# The key is address, port and rank.
_opened: dict[tuple[str, int, int], _Opened] = {}


def store_of_job(
    topology: Topology, hosts: bool, timeout_s: float, clock: ActiveClock, lookups: ExitStack
) -> tuple[Store, str]:
    """Opens the store for the next job of this process, without keys of earlier jobs.

    Returns the store and this host's own address.

    Args:
        topology: This rank, and the address of the rendezvous.
        hosts: True if this process is the server of the store.
        timeout_s: How long to wait for the store.
        clock: Measures the wait.
        lookups: Stack that keeps DNS lookups disabled until the caller closes it. Lookups are
            disabled once the address is known.
    """
    place = (topology.master_addr, topology.master_port, topology.rank)
    opened = _opened.get(place)
    if opened is None:
        # Names are resolved here; torch gets a numeric address.
        own, target = (
            ("", _own_address(topology)) if hosts else _await_host(topology, timeout_s, clock)
        )
        lookups.enter_context(names_from_files())
        opened = _Opened(_open_store(topology, target, hosts, timeout_s, clock), own)
        _opened[place] = opened
        return opened.store, opened.address
    opened.meetings += 1
    return PrefixStore(f"paceline-job-{opened.meetings}", opened.store), opened.address


def forget_store(topology: Topology) -> None:
    """Forgets the open store after a failure, so that the next job of this process opens it again."""
    _opened.pop((topology.master_addr, topology.master_port, topology.rank), None)


def _own_address(topology: Topology) -> str:
    """Returns a numeric address at which the host of the store reaches itself."""
    if (listener := _loopback_address(topology)) is not None:
        return listener[1]
    entries = socket.getaddrinfo(
        topology.master_addr, topology.master_port, type=socket.SOCK_STREAM
    )
    # Prefer IPv4. Torch listens on IPv4 and IPv6 if the host has IPv6.
    entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(entries[0][4][0])


def _await_host(topology: Topology, timeout_s: float, clock: ActiveClock) -> tuple[str, str]:
    """Waits until a process listens at the job's address.

    Returns the numeric addresses of this host and of the listener. Torch would also wait for the
    listener, but its error message is very long.
    """
    while True:
        left_s = timeout_s - clock.now_s()
        try:
            address = (topology.master_addr, topology.master_port)
            with socket.create_connection(address, timeout=max(left_s, _RETRY_S)) as connection:
                return str(connection.getsockname()[0]), str(connection.getpeername()[0])
        except OSError:  # also if the name is unknown, which can change when its host has started
            if left_s <= 0:
                raise
        time.sleep(_RETRY_S)


def _open_store(
    topology: Topology, address: str, hosts: bool, timeout_s: float, clock: ActiveClock
) -> TCPStore:
    """Starts the store's server, or connects to it, in a thread.

    If a foreign program listens at the address and never answers, torch waits longer than its timeout.
    The thread lets the caller raise TimeoutError in time.
    """
    outcome: queue.SimpleQueue[TCPStore | Exception] = queue.SimpleQueue()

    def open_store() -> None:
        try:
            listener = _loopback_listener(topology) if hosts else None
            store = TCPStore(
                address,
                topology.master_port,
                is_master=hosts,
                timeout=timedelta(seconds=timeout_s),
                # The greetings of the rendezvous wait for the ranks, and can name missing ranks.
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


def _loopback_address(topology: Topology) -> tuple[socket.AddressFamily, str] | None:
    """Returns the family and the loopback address at which the ranks meet, or None.

    Returns None if the job has several nodes, because other nodes cannot reach a loopback address. Also
    returns None if the job's address is not a loopback address.
    """
    if topology.local_world_size < topology.world_size:
        return None
    entries = socket.getaddrinfo(
        topology.master_addr, topology.master_port, type=socket.SOCK_STREAM
    )
    for family, _, _, _, address in entries:
        if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            return None
        try:
            # `localhost` might resolve to ::1 even if the host has no IPv6.
            with socket.socket(family) as probe:
                probe.bind((str(address[0]), 0))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
        else:
            return family, str(address[0])
    return None


def _loopback_listener(topology: Topology) -> int | None:
    """Returns the file descriptor of a socket that listens at the loopback address.

    Returns None if there is no loopback address; torch then listens on every address.
    """
    place = _loopback_address(topology)
    if place is None:
        return None
    family, address = place
    listener = socket.create_server(
        (address, topology.master_port), family=family, backlog=_BACKLOG
    )
    return listener.detach()


_CONFIG = Path("/etc/nsswitch.conf")
_DEFAULT_SOURCES = "files dns"

_lock = threading.Lock()
_users = 0


@contextmanager
def names_from_files() -> Iterator[None]:
    """Makes the process look up host names only in /etc/hosts while the context is active.

    Does nothing if the C library is not glibc.
    """
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _look_up_in("files")
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _look_up_in(_configured_sources())


def _look_up_in(sources: str) -> None:
    """Sets where host names are looked up, such as `files dns`, with a function of glibc's <nss.h>."""
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is not None:
        configure(b"hosts", sources.encode())


def _configured_sources() -> str:
    try:
        line = re.search(r"^\s*hosts:([^#\n]*)", _CONFIG.read_text(), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return _DEFAULT_SOURCES
    return line[1].strip() if line else _DEFAULT_SOURCES
