"""The rendezvous: ranks find one another at the address that the launcher names.

In: a `Topology`. Out: the key-value store that all ranks share. Under torchrun the agent hosts it, so
it outlives a dying rank; elsewhere rank 0 does.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from paceline.core.errors import CommError
from paceline.core.topology import Topology


def meet(topology: Topology, timeout_s: float) -> Store:
    """Returns the shared store, or fails with a line that names address, port and remedy."""
    os.environ.setdefault("MASTER_ADDR", topology.master_addr)
    os.environ.setdefault("MASTER_PORT", str(topology.master_port))
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, _, _ = next(
            iter(
                rendezvous(
                    "env://",
                    topology.rank,
                    topology.world_size,
                    timeout=timedelta(seconds=timeout_s),
                )
            )
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise CommError(*explain(where, topology, error, timeout_s)) from error
    assert isinstance(store, Store)
    return store


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
    if "resolve" in text or "name or service" in text or "getaddrinfo" in text:
        return (f"the host of {where} cannot be resolved", "set MASTER_ADDR to rank 0's address")
    if isinstance(error, ValueError):
        return (f"{where} is not an address of a rendezvous", "set MASTER_ADDR and MASTER_PORT")
    return (
        f"rank {topology.rank} did not meet the others at {where} within {timeout_s:g} s",
        "check that rank 0 runs, that MASTER_ADDR and MASTER_PORT are its own, and the firewall",
    )
