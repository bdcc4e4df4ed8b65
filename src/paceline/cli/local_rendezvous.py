"""`LocalRendezvous`: the agent's store for ranks on this host alone, on the loopback address.

In: a port, or 0 for a free one. Out: a rendezvous handler for torch's elastic agent. Torch's own handlers
listen on every address of the host, and the default one (c10d) unpickles what it finds in its store:
whoever reaches the port could run code as this user. One node has nobody to negotiate with, so this
handler stores nothing of its own and keeps its port closed to the network.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

ADDRESS = "127.0.0.1"
BACKEND = "paceline-local"
_TIMEOUT = timedelta(seconds=60)


class LocalRendezvous(RendezvousHandler):
    """The same store serves every restart of the ranks, as the agent expects."""

    def __init__(self, port: int, run_id: str) -> None:
        """Raises OSError where the port cannot be had."""
        listener = socket.create_server((ADDRESS, port), backlog=1024)
        self.port: int = listener.getsockname()[1]
        self._run_id = run_id
        self._store = TCPStore(
            ADDRESS,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=_TIMEOUT,
            multi_tenant=True,
            # The store takes the socket over, and with it its address.
            master_listen_fd=listener.detach(),
        )

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(ADDRESS, self.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could still come."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    """For torch's registry of handlers; the port is the endpoint's."""
    return LocalRendezvous(int(parameters.endpoint.rpartition(":")[2]), parameters.run_id)


def register() -> str:
    """Makes the handler known to the agent; returns the name by which a `LaunchConfig` asks for it."""
    rendezvous_handler_registry.register(BACKEND, create)
    return BACKEND
