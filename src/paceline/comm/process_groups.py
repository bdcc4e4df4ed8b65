"""`ProcessGroups`, the torch.distributed groups of the gradient exchange, and NCCL's environment.

Ranks send each other messages in a group of all ranks. With NCCL, some algorithms also run NCCL's
collectives among a part of the ranks, and need a group for each such part: a row, a column or the
masters (`plan.steps.Groups`). All ranks create the groups together in the same order, or all raise the
same error.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.core.errors import CommError, ConfigError
from paceline.core.topology import Topology
from paceline.plan.schedules import parts_used
from paceline.plan.steps import Groups


def group_ranks(nodes: Sequence[int], k: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each group: one group for each node, or groups of k ranks.

    If k is at most the number of ranks on the largest node, each node is split separately, so that no
    group spans two nodes. A larger k joins neighbouring nodes. The last group of a node or of the job can
    be smaller than k.

    Args:
        nodes: The index of each rank's node.
        k: The number of ranks in a group. None makes each node a group.
    """
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    rows = [by_node[node] for node in sorted(by_node)]
    if k is None:
        return tuple(map(tuple, rows))
    if k < 1:
        raise ConfigError("comm.group_size", k, "must be 1 or more", "leave it at its default")
    if k > max(map(len, rows)):
        rows = [[rank for row in rows for rank in row]]
    # Ascending, as torch.distributed numbers the members of a group.
    return tuple(tuple(sorted(row[at : at + k])) for row in rows for at in range(0, len(row), k))


# torch's own NCCL watchdog aborts the process with a C++ stack trace if another rank has ended.
# Paceline's watchdog can name the missing rank and the collective, so torch's watchdog is disabled.
# Variables that the user has set are not changed.
_NCCL_ENVIRONMENT = {
    # 0: no abort of the process; NCCL's errors stay readable, and our watchdog ends the rank.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Without this, torch's watchdog thread throws after a CUDA error, and the process ends with SIGABRT.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
# After a failed collective torch sets a key in the store that asks all ranks to write a debug dump.
# torchrun's store keeps this key when it restarts the ranks. Torch's monitor thread in the new processes
# then obeys the old request: it blocks the end of the process for 8 minutes, and aborts a longer run.
_RESTARTED_ENVIRONMENT = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
_MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ProcessGroups:
    """The process groups of the gradient exchange, separate from torch.distributed's default group.

    Because of this separation, collectives of the exchange cannot interleave with those of the main
    thread. The default group must exist, unless the job has a single process.

    Args:
        topology: This rank and the number of ranks.
        k: The number of ranks in a row (a group of hierarchical algorithms). None makes each node a
            row.
        timeout_s: The time limit of a collective in seconds.
        grace_s: Seconds that the backend waits beyond `timeout_s`, if a watchdog enforces
            `timeout_s`.
        subgroups: Create groups for rows, columns and masters. None means True for NCCL only. Over Gloo
            the algorithms only need the group of all ranks, and each further group opens sockets
            between all its members.
        algorithms: Create only the sub-groups that these algorithms need. None creates all.
        connect_s: The time limit in seconds to connect the groups. None means `timeout_s`.
    """

    def __init__(
        self,
        topology: Topology,
        k: int | None = None,
        *,
        timeout_s: float = 600.0,
        grace_s: float = 0.0,
        subgroups: bool | None = None,
        algorithms: Collection[str] | None = None,
        connect_s: float | None = None,
    ) -> None:
        self.rank = topology.rank
        self.world_size = topology.world_size
        self.timeout_s = timeout_s
        self._wait = timedelta(seconds=timeout_s + grace_s)
        self._connect = self._wait if connect_s is None else timedelta(seconds=connect_s)
        self.world: ProcessGroup | None = None
        self.row: ProcessGroup | None = None
        self.masters: ProcessGroup | None = None
        self.columns: dict[int, ProcessGroup] = {}
        self._made: list[ProcessGroup] = []
        if not dist.is_initialized():
            if topology.world_size > 1:
                raise CommError(
                    f"the job has {topology.world_size} ranks, but torch.distributed is not initialized",
                    "call torch.distributed.init_process_group first",
                )
            self.backend = "none"
            self.layout = Groups(((0,),))
            return
        self.backend = str(dist.get_backend())
        nested = self.backend == "nccl" if subgroups is None else subgroups
        self.layout = Groups(_agree(topology, k, timeout_s), nested)
        self.world = self._make(self.layout.order)
        if nested:
            every = frozenset({"rows", "columns", "masters"})
            self._make_parts(every if algorithms is None else parts_used(algorithms, self.layout))

    def _make_parts(self, used: Collection[str]) -> None:
        # Every rank creates every group, also groups to which it does not belong: torch numbers groups
        # to name them.
        for row in self.layout.groups if "rows" in used else ():
            self.row = self._make(row) or self.row
        masters = self.layout.masters
        if "masters" in used or "columns" in used:
            self.masters = self._make(masters)
        for number, column in enumerate(self.layout.columns if "columns" in used else ()):
            # The first column is the group of masters.
            made = self._make(column) if column != masters else self.masters
            if made is not None:
                self.columns[number] = made

    def _make(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        """Creates the process group of `ranks`. Returns None if this rank is not a member."""
        group = dist.new_group(list(ranks), timeout=self._connect, backend=self.backend)
        if not isinstance(group, ProcessGroup) or self.rank not in ranks:
            return None
        if self._connect != self._wait:
            distributed_c10d._set_pg_timeout(self._wait, group)
        self._made.append(group)
        return group

    def check_same(self, facts: Mapping[str, object]) -> None:
        """Checks that the values `facts` are equal on all ranks. All ranks call this.

        Raises:
            CommError: On every rank, if a fact differs.
        """
        if self.world is not None:
            compare_reports(all_gather_json(dict(facts), self.world))

    def close(self) -> None:
        """Destroys the process groups that this object has created."""
        while self._made:
            group = self._made.pop()
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self.world = self.row = self.masters = None
        self.columns = {}


def current_topology(known: Topology | None = None) -> Topology:
    """Returns `known`, or the topology from the launcher's environment if `known` is None.

    If a default process group exists, its rank and its number of ranks take precedence. A program can
    start ranks with torch.multiprocessing inside a job whose environment describes only the parent
    process. Such ranks are treated as ranks of one node.
    """
    if not dist.is_initialized():
        return known or Topology.from_env(os.environ)
    rank, world = dist.get_rank(), dist.get_world_size()
    with suppress(CommError):
        topology = known or Topology.from_env(os.environ)
        if (topology.rank, topology.world_size) == (rank, world):
            return topology
    return Topology(rank, world, rank, world, launcher="process group")


def _agree(topology: Topology, k: int | None, timeout_s: float) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each group after checking that all ranks agree on it.

    All ranks check the same gathered values, so all ranks raise the same error.
    """
    own = [topology.rank, topology.world_size, topology.node_rank, topology.local_world_size]
    facts = {"comm.group_size": k, "comm.timeout_s": timeout_s}
    places, reports = zip(*all_gather_json([own, facts]), strict=True)
    compare_reports(reports)
    nodes = [node for _, _, node, _ in places]
    for rank, (claimed, world, node, local_world) in enumerate(places):
        if (claimed, world, local_world) != (rank, len(places), nodes.count(node)):
            raise CommError(
                f"the launcher's variables of rank {rank} contradict those of the other ranks: it counts "
                f"as rank {claimed} of {world}, with {local_world} ranks on node {node}",
                "start all ranks with one launcher; check its variables for rank, node and local rank",
            )
    return group_ranks(nodes, k)


def all_gather_json(value: object, group: ProcessGroup | None = None) -> list[Any]:
    """Returns every rank's value, in order of rank, on all ranks. All ranks of the group call this.

    This replaces torch's `all_gather_object`, which unpickles received data and so can run any code that
    another rank sends. JSON must be able to represent `value`.
    """
    data = json.dumps(value).encode()
    # NCCL sends only GPU memory.
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    ranks = dist.get_world_size(group)
    lengths = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(lengths, torch.tensor([len(data)], device=device), group=group)
    longest = max(int(length) for length in lengths)
    row = torch.zeros(longest, dtype=torch.uint8, device=device)
    row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    rows = [torch.empty_like(row) for _ in range(ranks)]
    dist.all_gather(rows, row, group=group)
    return [
        json.loads(r.cpu().numpy().tobytes()[: int(length)])
        for r, length in zip(rows, lengths, strict=True)
    ]


def init_default_group(
    backend: str, store: Store, topology: Topology, timeout_s: float, device: torch.device,
    connect_s: float | None = None,
) -> None:  # fmt: skip
    """Creates the default process group for ranks that have met in `store`.

    With Gloo the ranks then wait for each other, because a rank that ends early would break connections
    that other ranks are still opening.

    Args:
        backend: `nccl` or `gloo`.
        store: The store of the rendezvous.
        topology: This rank and the number of ranks.
        timeout_s: The time limit of a collective in seconds.
        device: The device of this rank.
        connect_s: The time limit for connecting in seconds. None means `timeout_s`.
    """
    dist.init_process_group(
        backend,
        store=PrefixStore("paceline", store),
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=timedelta(seconds=timeout_s if connect_s is None else connect_s),
        device_id=device if backend == "nccl" else None,
    )
    if backend == "gloo":
        dist.barrier()
    if connect_s is not None:
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))


def compare_reports(
    reports: Sequence[Mapping[str, object]],
    remedy: str = "start every rank with the same settings",
) -> None:
    """Raises CommError for the first fact in which a rank's report differs from rank 0's."""
    for rank, theirs in enumerate(reports):
        for name, first in reports[0].items():
            if theirs.get(name) != first:
                raise CommError(
                    f"ranks differ in {name}: {first} on rank 0, {theirs.get(name)} on rank {rank}",
                    remedy,
                )


def prepare_nccl(topology: Topology, *, share_gpus: bool, watched: bool = True) -> None:
    """Sets NCCL's environment variables, before the process group is created.

    Args:
        topology: This rank.
        share_gpus: Allow several ranks on one GPU.
        watched: True if a `Watchdog` observes the collectives. If False, torch's own watchdog stays
            enabled.
    """
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    chosen = _NCCL_ENVIRONMENT if watched else _RESTARTED_ENVIRONMENT if restarted else {}
    for name, value in chosen.items():
        os.environ.setdefault(name, value)
    if not share_gpus or topology.world_size == 1:
        return
    require_mps()
    # NCCL refuses two ranks of one host on one GPU. With different host ids, each rank treats the other
    # ranks as remote and exchanges data with them through sockets.
    os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}-rank{topology.rank}")
    if topology.master_addr in _LOOPBACK:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def require_mps() -> None:
    """Checks that NVIDIA MPS runs. Raises ConfigError otherwise.

    Without MPS, kernels of different processes do not run concurrently on a GPU. A collective would then
    wait forever for the kernel of the other process.
    """
    pipes = Path(os.environ.get(_MPS_PIPES) or "/tmp/nvidia-mps")
    if not (pipes / "control").exists():
        raise ConfigError(
            "comm.share_gpus", True, f"needs a running NVIDIA MPS (no {pipes / 'control'})",
            "start it with `nvidia-cuda-mps-control -d`",
        )  # fmt: skip
