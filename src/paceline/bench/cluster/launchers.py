"""The ways to start ranks on the hosts of a cluster.

In: a command and the number of ranks on each host. Out: for each process to be started its host, its
command line and its environment. `torchrun` is the real thing: an agent on each host, with a rendezvous
over the network. `plain` starts each rank by itself with the variables set, which is seconds cheaper.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.bench.cluster.host_link import INTERFACE, host_address

_FOREIGN = ("SLURM_", "OMPI_", "PMI_", "PRTE_", "TORCHELASTIC_", "PACELINE_", "PET_")
_FOREIGN_NAMES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
    "MASTER_PORT",
}  # fmt: skip


@dataclass(frozen=True)
class Start:
    """One process to be started, the folder for what it says, and where its ranks' output lies there.

    `rank_files` has a pattern for each rank of the process, with `{stream}` for stdout or stderr.
    """

    host: int
    command: list[str]
    env: dict[str, str]
    logs: Path
    rank_files: tuple[str, ...]


def host_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Ours without any launcher's traces, for a process on a host."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in _FOREIGN_NAMES and not name.startswith(_FOREIGN)
    }
    # Without the name Gloo would ask the resolver for the host's own address.
    env |= {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
    # All hosts share this machine's cores.
    env.setdefault("OMP_NUM_THREADS", "1")
    return env | dict(extra)


def as_program(command: Sequence[str]) -> list[str]:
    """A script or `-m MODULE` is run by this Python; anything else is a program already."""
    if command and (command[0] == "-m" or command[0].endswith(".py")):
        return [sys.executable, *command]
    return list(command)


def torchrun(
    command: Sequence[str], ranks: Sequence[int], port: int, env: Mapping[str, str], logs: Path
) -> list[Start]:
    """An agent for each host; the first host's keeps the store."""
    starts = []
    for host, count in enumerate(ranks):
        own = logs / f"host{host}"
        options = {
            "--nnodes": len(ranks), "--node-rank": host, "--nproc-per-node": count,
            "--master-addr": host_address(0), "--master-port": port,
            "--local-addr": host_address(host), "--redirects": 3, "--log-dir": own / "ranks",
        }  # fmt: skip
        flags = [str(part) for option in options.items() for part in option]
        agent = [sys.executable, "-m", "torch.distributed.run", *flags, "--no-python"]
        files = tuple(f"ranks/*/attempt_*/{n}/{{stream}}.log" for n in range(count))
        program = [*agent, *as_program(command)]
        starts.append(Start(host, program, host_environment(env), own, files))
    return starts


def plain(
    command: Sequence[str], ranks: Sequence[int], port: int, env: Mapping[str, str], logs: Path
) -> list[Start]:
    """Each rank with its place in its environment; nobody watches over them."""
    starts: list[Start] = []
    for host, count in enumerate(ranks):
        for local_rank in range(count):
            place = {
                "RANK": len(starts), "WORLD_SIZE": sum(ranks), "LOCAL_RANK": local_rank,
                "LOCAL_WORLD_SIZE": count, "GROUP_RANK": host,
                "MASTER_ADDR": host_address(0), "MASTER_PORT": port,
            }  # fmt: skip
            own = host_environment({name: str(value) for name, value in place.items()} | dict(env))
            folder = logs / f"rank{len(starts)}"
            starts.append(Start(host, as_program(command), own, folder, ("{stream}",)))
    return starts
