"""`Node`: which node of a job this is, and how its launcher finds the others (`--nnodes`)."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from paceline.core.errors import ConfigError, LaunchError
from paceline.core.topology import DEFAULT_PORT, first_slurm_host
from paceline.core.untrusted import parse_table

LOOPBACK = "127.0.0.1"
_JOB = "paceline/supervisors/job"
# The variables with which SLURM and an Indexed Job of Kubernetes number nodes.
_NODE_VARIABLES = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")


@dataclass(frozen=True)
class Node:
    """Which node of a job this process starts ranks on, and the address of the first node.

    Attributes:
        processes: The number of ranks on each node.
        count: The number of nodes.
        rank: The index of this node.
        address: The address of the first node.
        port: The port of the TCPStore on the first node; 0 finds a free one, for a single node.
        timeout_s: How many seconds to wait for the launcher on the first node.
    """

    processes: int
    count: int = 1
    rank: int = 0
    address: str = LOOPBACK
    port: int = 0
    timeout_s: float = 300.0

    @property
    def world_size(self) -> int:
        return self.count * self.processes

    @classmethod
    def from_flags(
        cls,
        processes: int,
        count: int,
        rank: int | None,
        address: str | None,
        port: int,
        env: Mapping[str, str],
    ) -> Node:
        """Builds a `Node` from flags, and from environment variables for flags that are not given.

        Raises:
            ConfigError: If a flag contradicts another one or a value is unknown.
        """
        if not 0 <= port < 65536:
            raise ConfigError("--master-port", port, "must be 0 to 65535")
        if count == 1:
            for flag, value in (("--node-rank", rank), ("--master-addr", address)):
                if value is not None:
                    raise ConfigError(flag, value, "needs several nodes", "give --nnodes")
            return cls(processes, port=port)
        if rank is None:
            found = next((env[name] for name in _NODE_VARIABLES if env.get(name)), "")
            if not found.isdecimal():
                raise ConfigError("--node-rank", None, "is needed", "give 0 on the first node")
            rank = int(found)
        if not 0 <= rank < count:
            raise ConfigError("--node-rank", rank, f"must be 0 to {count - 1}")
        address = address or env.get("MASTER_ADDR")
        address = address or first_slurm_host(env.get("SLURM_STEP_NODELIST", ""))
        if not address:
            raise ConfigError("--master-addr", None, "is needed", "give the first node's address")
        text = env.get("MASTER_PORT", "")
        default = int(text) if text.isdecimal() else DEFAULT_PORT
        return cls(processes, count, rank, address, port or default)


def open_store(node: Node) -> TCPStore:
    """Starts a TCPStore on the first node, and connects to it on the others.

    On a single node the store listens on the loopback address only.
    """
    limit = timedelta(seconds=node.timeout_s)
    if node.rank:
        try:
            return TCPStore(node.address, node.port, is_master=False, timeout=limit)
        except RuntimeError as error:
            raise LaunchError(
                f"node {node.rank} does not reach the first node at {node.address}:{node.port} "
                f"within {node.timeout_s:g} s ({_reason(error)})",
                "check --master-addr, --master-port and that the first node has started",
            ) from None
    try:
        listener = socket.create_server((node.address, node.port), backlog=8192)
        return TCPStore(
            node.address, listener.getsockname()[1], is_master=True, wait_for_workers=False,
            timeout=limit, multi_tenant=True,
            # The store uses the address of this socket.
            master_listen_fd=listener.detach(),
        )  # fmt: skip
    except (RuntimeError, OSError) as error:
        raise LaunchError(
            f"the launcher cannot listen on {node.address}:{node.port} ({_reason(error)})",
            "choose a free --master-port, or 0 for any free one",
        ) from None


def _reason(error: BaseException) -> str:
    """Returns a short reason for an error of the TCPStore: a known one, or the error's first line."""
    text = str(error).strip()
    if "EADDRINUSE" in text or "in use" in text.lower():
        return "the port is in use"
    lines = text.splitlines()
    return (lines[0] if lines else type(error).__name__)[:120]


def agree_on_job(store: TCPStore, node: Node) -> str:
    """Returns the id of the job, which the first node chooses.

    Raises LaunchError if nodes were started with different numbers of ranks or nodes.
    """
    own = {"nodes": node.count, "processes": node.processes}
    if node.rank == 0:
        run_id = uuid.uuid4().hex
        store.set(_JOB, json.dumps({"id": run_id, **own}))
        return run_id
    job = parse_table(store.get(_JOB))
    for name, flag in (("nodes", "--nnodes"), ("processes", "--nproc-per-node")):
        if job.get(name) != own[name]:
            raise LaunchError(
                f"{flag} is {own[name]} on node {node.rank} and {job.get(name)} on the first node",
                "start all nodes with the same command, except --node-rank",
            )
    return str(job.get("id"))
