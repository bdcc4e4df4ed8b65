"""`Topology`: the rank of this process, the number of ranks, and the address of the rendezvous.

These values come from the environment variables of a launcher: torchrun, SLURM, OpenMPI or PMI.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.core.errors import CommError

DEFAULT_PORT = 29500
# Larger numbers are mistakes. Within this limit no count overflows, and loops end.
RANKS_LIMIT = 1 << 20


@dataclass(frozen=True)
class Topology:
    """The place of this process in a job: ranks, nodes, and the address where ranks meet.

    Attributes:
        rank: The rank of this process.
        world_size: The number of ranks in the job.
        local_rank: The rank of this process within the node.
        local_world_size: The number of ranks on this node.
        node_rank: The index of this node.
        master_addr: The host name or address at which the ranks connect.
        master_port: The port at which the ranks connect.
        launcher: The kind of launcher: `single` (none), `torchrun`, `environment`, `slurm`, `openmpi`
            or `mpi`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT
    launcher: str = "single"

    def __post_init__(self) -> None:
        if self.world_size > RANKS_LIMIT:
            raise CommError(
                f"a world of {self.world_size} ranks ({self.launcher}) is more than {RANKS_LIMIT:,}",
                "check the launcher's environment variables",
            )
        for field, value, limit in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if not 0 <= value < limit:
                raise CommError(
                    f"{field} {value} does not fit a {field.replace('rank', 'world')} of {limit} "
                    f"({self.launcher})",
                    "check the launcher's environment variables",
                )

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def ends_together(self) -> bool:
        """Returns True if the launcher ends all ranks once one has ended."""
        if self.launcher == "torchrun":  # its agents watch the ranks of their node
            return self.local_world_size == self.world_size
        return self.world_size == 1 or self.launcher in ("openmpi", "mpi")

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Topology:
        """Reads the launcher's environment variables; those of torchrun precede those of a scheduler.

        Raises:
            CommError: If the variables are incomplete or contradict each other.
        """
        if "RANK" in env and "WORLD_SIZE" in env:
            return _torchrun(env)
        # Before SLURM, because inside an allocation mpirun starts helpers with srun, and ranks inherit
        # their SLURM variables, which count the helpers.
        if "OMPI_COMM_WORLD_RANK" in env:
            return _openmpi(env)
        if "PMI_RANK" in env and "MPI_LOCALNRANKS" in env:
            return _pmi(env)
        # A shell inside an allocation has SLURM_NTASKS but no step; only tasks of srun are ranks.
        if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and "SLURM_NTASKS" in env:
            return _slurm(env)
        if "PMI_RANK" in env:
            return _pmi(env)
        if "RANK" in env:
            raise CommError(
                f"RANK = {env['RANK']} but WORLD_SIZE is not set",
                "start with torchrun, srun or mpirun, or unset RANK",
            )
        if "WORLD_SIZE" in env and _integer(env, "WORLD_SIZE", 1) > 1:
            raise CommError(
                f"WORLD_SIZE = {env['WORLD_SIZE']} but RANK is not set",
                "start with torchrun, srun or mpirun, or unset WORLD_SIZE",
            )
        return cls()


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            raise CommError(f"{name} is not set", "start with torchrun, srun or mpirun")
        return default
    try:
        return int(text)
    except ValueError:
        raise CommError(
            f"{name} = {text!r} is not a whole number", f"set {name} to a whole number"
        ) from None


def _address(env: Mapping[str, str], world_size: int, first_host: str | None) -> tuple[str, int]:
    """Returns host and port at which ranks connect: MASTER_ADDR and MASTER_PORT, or the first host."""
    address = env.get("MASTER_ADDR") or first_host
    if address is None:
        if world_size > 1:
            raise CommError(
                "MASTER_ADDR is not set, so the ranks cannot find rank 0",
                "export MASTER_ADDR=<host of rank 0> and MASTER_PORT=<free port> to every rank",
            )
        address = "127.0.0.1"
    port = _integer(env, "MASTER_PORT", DEFAULT_PORT)
    if not 0 < port < 65536:
        raise CommError(
            f"MASTER_PORT = {port} is not a port",
            "set MASTER_PORT to a free port from 1024 to 65535",
        )
    return address, port


def _local_world(env: Mapping[str, str], name: str, world: int) -> int:
    """Returns the number of ranks on this node from variable `name`, which must be set.

    A guess could differ between ranks.
    """
    if name not in env and world > 1:
        raise CommError(
            f"{name} is not set, so the number of ranks on this node is unknown",
            f"export {name}=<ranks on this node> to every rank",
        )
    local = _integer(env, name, 1)
    if not 1 <= local <= world:
        raise CommError(
            f"{name} = {local} does not fit a world of {world}", "check the launcher's variables"
        )
    return local


def _torchrun(env: Mapping[str, str]) -> Topology:
    world, rank = _integer(env, "WORLD_SIZE"), _integer(env, "RANK")
    address, port = _address(env, world, None)
    # PyTorchJob of Kubernetes sets neither of the local variables: each process has its own pod.
    alone = "LOCAL_RANK" not in env and "LOCAL_WORLD_SIZE" not in env
    local = 1 if alone else _local_world(env, "LOCAL_WORLD_SIZE", world)
    return Topology(
        rank=rank,
        world_size=world,
        local_rank=_integer(env, "LOCAL_RANK", 0 if alone or local == 1 else None),
        local_world_size=local,
        node_rank=_integer(env, "GROUP_RANK", rank // local),
        master_addr=address,
        master_port=port,
        launcher="torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment",
    )


def _slurm(env: Mapping[str, str]) -> Topology:
    world = _integer(env, "SLURM_NTASKS")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    address, port = _address(env, world, first_slurm_host(nodes))
    if "MASTER_PORT" not in env and "SLURM_JOB_ID" in env:
        # Two jobs on one node must not use the same port, so it depends on the number of the job.
        port = 20000 + _integer(env, "SLURM_JOB_ID") % 20000
    return Topology(
        rank=_integer(env, "SLURM_PROCID"),
        world_size=world,
        local_rank=_integer(env, "SLURM_LOCALID", 0),
        local_world_size=_slurm_local_world(env, world),
        node_rank=_integer(env, "SLURM_NODEID", 0),
        master_addr=address,
        master_port=port,
        launcher="slurm",
    )


def _slurm_local_world(env: Mapping[str, str], world: int) -> int:
    """Returns the number of ranks on this node. SLURM writes `4(x2),3` for 4, 4 and 3 ranks."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if not text:
        return max(1, world // max(1, _integer(env, "SLURM_NNODES", 1)))
    node = _integer(env, "SLURM_NODEID", 0)
    counts: list[int] = []
    try:
        for part in text.split(","):
            tasks, _, repeat = part.partition("(x")
            nodes = int(repeat.rstrip(")")) if repeat else 1
            counts += [int(tasks)] * min(nodes, RANKS_LIMIT)
        return counts[node]
    except (ValueError, IndexError):
        raise CommError(
            f"SLURM_TASKS_PER_NODE = {text!r} cannot be read", "start the ranks with srun"
        ) from None


def first_slurm_host(nodelist: str) -> str | None:
    """Returns the first host of SLURM's compressed list: `gpu003` of `gpu[003-007,9],login`."""
    if not nodelist:
        return None
    # A comma inside brackets separates numbers, one outside separates hosts. A name may have several
    # bracketed lists of numbers; the first host has the first number of each.
    host = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodelist)
    assert host is not None
    return re.sub(r"\[([^\]\-,]*)[^\]]*\]", r"\1", host.group())


def _openmpi(env: Mapping[str, str]) -> Topology:
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")]
    return _mpi(env, "openmpi", *names, guess=lambda rank, local: 0 if local == 1 else None)


def _pmi(env: Mapping[str, str]) -> Topology:
    names = ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID")
    return _mpi(env, "mpi", *names, guess=lambda rank, local: rank % local)


def _mpi(
    env: Mapping[str, str], launcher: str, size: str, place: str, local_size: str, local_place: str,
    *, guess: Callable[[int, int], int | None],
) -> Topology:  # fmt: skip
    """Reads the topology from the four named variables of MPI.

    `guess` computes the local rank if `local_place` is not set.
    """
    world, rank = _integer(env, size), _integer(env, place)
    local = _local_world(env, local_size, world)
    # If all ranks are on this host, rank 0 is also here, and the loopback address is correct.
    address, port = _address(env, world, "127.0.0.1" if local == world else None)
    return Topology(
        rank=rank,
        world_size=world,
        local_rank=_integer(env, local_place, guess(rank, local)),
        local_world_size=local,
        # OpenMPI's NODE_RANK is a rank within the node, not the number of the node. By default mpirun
        # fills one node after the other.
        node_rank=rank // local,
        master_addr=address,
        master_port=port,
        launcher=launcher,
    )
