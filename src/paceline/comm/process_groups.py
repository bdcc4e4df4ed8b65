"""`ProcessGroups`: the torch.distributed groups of the gradient exchange; `Collectives` on the tensors
and bytes of all ranks; NCCL's set-up and abort.

A group of all ranks carries messages. Where the backend's own collectives run in parts of the cluster
(NCCL), there are also groups for this rank's row, its columns and the masters of the layout
(`plan.steps.Groups`). All ranks create them at once, in one order, or all raise the same error.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.comm.settings import BACKEND_GRACE_S
from paceline.core.errors import CommError, ConfigError
from paceline.core.topology import Topology
from paceline.plan.schedules import parts_used
from paceline.plan.steps import Groups


@dataclass(frozen=True)
class Place:
    """Where one rank runs, as its launcher has it."""

    rank: int
    world_size: int
    node: int
    local_rank: int
    local_world_size: int


def group_ranks(places: Sequence[Place], k: int | None = None) -> tuple[tuple[int, ...], ...]:
    """One group for each node, or groups of k ranks; the last of a node, or of all, may be smaller.

    A k that fits into a node splits each node by itself, so that no group spans two nodes; a larger k
    joins neighbouring nodes.
    """
    nodes = _nodes(places)
    if k is None:
        return tuple(nodes)
    if k < 1:
        raise ConfigError("comm.group_size", k, "must be 1 or more", "leave it out for nodes")
    whole = [tuple(rank for node in nodes for rank in node)]
    pieces = nodes if k <= max(len(node) for node in nodes) else whole
    # Ascending, as torch.distributed numbers the members of a group.
    return tuple(
        tuple(sorted(piece[at : at + k])) for piece in pieces for at in range(0, len(piece), k)
    )


def _nodes(places: Sequence[Place]) -> list[tuple[int, ...]]:
    """The ranks of each node, in ascending order; fails where the ranks contradict."""
    remedy = "start all ranks with one launcher; check its variables for rank, node and local rank"
    world = len(places)
    if sorted(p.rank for p in places) != list(range(world)):
        raise CommError(f"the ranks are not 0 to {world - 1}, once each", remedy)
    nodes: dict[int, dict[int, Place]] = {}
    for place in sorted(places, key=lambda p: p.rank):
        if place.world_size != world:
            raise CommError(
                f"rank {place.rank} counts {place.world_size} ranks, but there are {world}", remedy
            )
        node = nodes.setdefault(place.node, {})
        if place.local_rank in node:
            raise CommError(
                f"ranks {node[place.local_rank].rank} and {place.rank} are both local rank "
                f"{place.local_rank} of node {place.node}",
                remedy,
            )
        node[place.local_rank] = place
    for number, node in nodes.items():
        for place in node.values():
            if place.local_world_size != len(node):
                raise CommError(
                    f"rank {place.rank} counts {place.local_world_size} ranks on node {number}, "
                    f"but {len(node)} are there",
                    remedy,
                )
    return [
        tuple(sorted(place.rank for place in node.values())) for _, node in sorted(nodes.items())
    ]


# torch's own NCCL watchdog aborts the process with a C++ stack trace when a peer is gone. Paceline's
# watchdog knows which rank is missing and in which collective, so torch's is switched off. Variables that
# a user has set stay as they are.
_NCCL_ENVIRONMENT = {
    # 0: no abort of the process; NCCL's errors stay readable, and our watchdog ends the rank.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # After a CUDA error torch's watchdog would throw in its own thread, which ends in SIGABRT.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
# After a failed collective torch asks all ranks, by a key in the store, to write a debug dump. The key
# has no prefix of the attempt. In torchrun's store it outlives a restart: the new attempt's monitor takes
# it for its own, blocks the end of the process for 8 minutes, and aborts a run that takes longer.
_RESTARTED_ENVIRONMENT = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
_MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ProcessGroups:
    """Separate from the default group, so that collectives of the main thread cannot interleave. The
    default group must exist, unless this process is alone."""

    def __init__(
        self,
        topology: Topology,
        k: int | None = None,
        *,
        timeout_s: float = 600.0,
        grace_s: float = 0.0,
        subgroups: bool | None = None,
        algorithms: Collection[str] | None = None,
    ) -> None:
        """`grace_s`: how much longer the backend waits, where a watchdog keeps `timeout_s`.
        `subgroups`: None makes them where the backend is NCCL. Over Gloo the explicit algorithms
        need the group of all ranks only, and each further group is a mesh of sockets. `algorithms`:
        only the sub-groups that these need; None makes all."""
        self.rank = topology.rank
        self.world_size = topology.world_size
        self.timeout_s = timeout_s
        self._wait = timedelta(seconds=timeout_s + grace_s)
        self.world: ProcessGroup | None = None
        self.row: ProcessGroup | None = None
        self.masters: ProcessGroup | None = None
        self.columns: dict[int, ProcessGroup] = {}
        self._made: list[ProcessGroup] = []
        if not dist.is_initialized():
            if topology.world_size > 1:
                raise CommError(
                    f"{topology.world_size} ranks, but torch.distributed is not initialised",
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
        # Every rank goes through all of them, members or not: torch counts groups to name them.
        for row in self.layout.groups if "rows" in used else ():
            self.row = self._make(row) or self.row
        masters = self.layout.masters
        if "masters" in used or "columns" in used:
            self.masters = self._make(masters)
        for number, column in enumerate(self.layout.columns if "columns" in used else ()):
            # The first column is that of the masters.
            made = self._make(column) if column != masters else self.masters
            if made is not None:
                self.columns[number] = made

    def _make(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        """The group, or None on ranks that are not in it."""
        group = dist.new_group(list(ranks), timeout=self._wait, backend=self.backend)
        if not isinstance(group, ProcessGroup) or self.rank not in ranks:
            return None
        self._made.append(group)
        return group

    def check_same(self, facts: Mapping[str, object]) -> None:
        """Fails, on every rank alike, unless all ranks have the same facts. All ranks call this."""
        if self.world is not None:
            _compare(all_gather_json(dict(facts), self.world))

    def close(self) -> None:
        """Leaves the groups; the default one stays."""
        while self._made:
            group = self._made.pop()
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self.world = self.row = self.masters = None
        self.columns = {}


def current_topology(known: Topology | None = None) -> Topology:
    """Returns `known`, or else the place that the launcher's environment gives.

    A process group that exists takes precedence: programs start ranks by other means
    (torch.multiprocessing), also inside a job whose variables describe their parent. Such ranks count as
    ranks of one node.
    """
    if not dist.is_initialized():
        return known or Topology.from_env(os.environ)
    rank, world = dist.get_rank(), dist.get_world_size()
    with suppress(CommError):
        found = known or Topology.from_env(os.environ)
        if (found.rank, found.world_size) == (rank, world):
            return found
    return Topology(rank, world, rank, world, launcher="process group")


def _agree(topology: Topology, k: int | None, timeout_s: float) -> tuple[tuple[int, ...], ...]:
    """The groups, from the reports of all ranks; each rank reads the same ones, so all fail alike."""
    place = Place(
        topology.rank,
        topology.world_size,
        topology.node_rank,
        topology.local_rank,
        topology.local_world_size,
    )
    facts = {"comm.group_size": k, "comm.timeout_s": timeout_s}
    gathered = all_gather_json([astuple(place), facts])
    reports = [(Place(*theirs), found) for theirs, found in gathered]
    _compare([theirs for _, theirs in reports])
    for rank, (found, _) in enumerate(reports):
        if found.rank != rank:
            raise CommError(
                f"rank {rank} of torch.distributed is rank {found.rank} in its topology",
                "check the launcher's environment variables",
            )
    return group_ranks([found for found, _ in reports], k)


def _either(new: str, old: str) -> Callable[..., Any]:
    """Torch renamed two collectives: the old names warn from 2.13 on, and 2.11 has only them."""
    found: Callable[..., Any] = getattr(dist, new if hasattr(dist, new) else old)
    return found


reduce_scatter_flat = _either("reduce_scatter_single", "reduce_scatter_tensor")
all_gather_flat = _either("all_gather_single", "all_gather_into_tensor")


def all_gather_json(value: object, group: ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, in order of rank, on all ranks. All ranks of the group call this.

    Torch's `all_gather_object` unpickles what arrives, and so runs whatever code a peer sends."""
    data = json.dumps(value).encode()
    # NCCL moves memory of the GPU only.
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
    backend: str, store: Store, topology: Topology, timeout_s: float, device: torch.device
) -> None:
    """Makes the default process group. All ranks have met in `store`; with Gloo they meet once more: a
    rank that left soon would break connections that the others still make."""
    dist.init_process_group(
        backend,
        store=PrefixStore("paceline", store),
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    if backend == "gloo":
        dist.barrier()


def backend_reason(error: RuntimeError) -> str:
    """The first sentence of a backend's error, without the line of source code that it begins with."""
    text = re.sub(r"^\[[^\]]*:\d+\]\s*", "", str(error).strip())
    return text.splitlines()[0].partition(". ")[0][:160] if text else type(error).__name__


def _compare(reports: Sequence[Mapping[str, object]]) -> None:
    for rank, theirs in enumerate(reports):
        for name, first in reports[0].items():
            if theirs.get(name) != first:
                raise CommError(
                    f"ranks differ in {name}: {first} on rank 0, {theirs.get(name)} on rank {rank}",
                    "start every rank with the same settings",
                )


def prepare_nccl(topology: Topology, *, share_gpus: bool, watched: bool = True) -> None:
    """Before the process group is created; NCCL and torch read the environment only then. Without
    `watched` no `Watchdog` follows the collectives, and torch's own stays on."""
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    chosen = _NCCL_ENVIRONMENT if watched else _RESTARTED_ENVIRONMENT if restarted else {}
    for name, value in chosen.items():
        os.environ.setdefault(name, value)
    if not share_gpus or topology.world_size == 1:
        return
    require_mps()
    # NCCL refuses two ranks of one host on one GPU. Ranks with different host ids take each other for
    # remote and talk through sockets.
    os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}-rank{topology.rank}")
    if topology.master_addr in _LOOPBACK:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def require_mps() -> None:
    """Without MPS the processes' kernels take turns, and a collective waits for its peer forever."""
    pipes = Path(os.environ.get(_MPS_PIPES) or "/tmp/nvidia-mps")
    if not (pipes / "control").exists():
        raise ConfigError(
            "comm.share_gpus", True, f"NVIDIA MPS does not run (no {pipes / 'control'})",
            "start it with `nvidia-cuda-mps-control -d`",
        )  # fmt: skip


def abort_process_groups(release_graphs: Iterable[Callable[[], None]], limit_s: float) -> None:
    """Ends all process groups without waiting for the other ranks, within about `limit_s` seconds.

    The abort ends kernels that wait for a lost rank. It returns once no CUDA graph refers to the
    communicators any more, so graphs are destroyed first. A thread does it, because after a CUDA error
    or on a stuck device the calls may not return.
    """

    def run() -> None:
        for release in release_graphs:
            # On a lost context: the other graphs are released and the groups aborted all the same.
            with suppress(Exception):
                release()
        with suppress(Exception):  # likewise, or the groups are gone already
            if dist.is_initialized():
                distributed_c10d._abort_process_group()

    thread = threading.Thread(target=run, name="paceline-abort", daemon=True)
    thread.start()
    thread.join(limit_s)


Made = TypeVar("Made")

# Of all ranks, on rank 0's device at a time.
_GATHERED_BYTES = 256 * 2**20


class Collectives(ABC):
    """What all ranks compute together; every method is called by all of them alike. With the backend
    `none` a single process has nothing to send."""

    def __init__(self, topology: Topology, device: torch.device, backend: str) -> None:
        self.topology = topology
        self.rank = topology.rank
        self.world_size = topology.world_size
        self.device = device
        self.backend = backend

    @abstractmethod
    def watched(self, what: str, action: Callable[[], Made]) -> Made:
        """Runs a collective under the watchdog and returns its result."""

    def completed(self, what: str, action: Callable[[], object]) -> None:
        """`watched`, until the collective has ended on the device. NCCL's calls return once the work is
        queued; the wait for a lost rank would come later, unwatched."""

        def complete() -> None:
            action()
            if self.backend == "nccl":
                torch.cuda.current_stream(self.device).synchronize()

        self.watched(what, complete)

    def all_reduce_sum(self, tensor: Tensor, *, wait: bool = True) -> None:
        """Replaces `tensor` by its sum over ranks, bit-identical on all of them. Without `wait` a
        GPU may not have finished; whoever waits for the device does so under `watched`."""
        if self.backend == "none":
            return
        if wait:
            self.completed("all-reduce", lambda: dist.all_reduce(tensor))
        else:
            self.watched("all-reduce", lambda: dist.all_reduce(tensor))

    def create_subgroup(self, size: int, timeout_s: float) -> Callable[[Tensor], None]:
        """A sum over this rank's neighbours in groups of `size` ranks, one group after the other. All
        ranks call this. The result does not wait for a GPU; over Gloo a sum is complete on return."""
        made: Any = None
        wait = timedelta(seconds=timeout_s + BACKEND_GRACE_S)
        for first in range(0, self.world_size, size):
            members = list(range(first, first + size))
            # Every rank goes through all of them, members or not: torch counts groups to name them.
            make = partial(dist.new_group, members, timeout=wait, backend=self.backend)
            found = self.watched("creating a group of ranks", make)
            made = found if self.rank in members else made

        def all_reduce(tensor: Tensor) -> None:
            self.watched("batch-norm statistics", lambda: dist.all_reduce(tensor, group=made))

        return all_reduce

    def broadcast(self, tensor: Tensor) -> None:
        """Replaces `tensor` by rank 0's."""
        if self.backend != "none":
            self.completed("broadcast", lambda: dist.broadcast(tensor, src=0))

    def gather_rows(self, rows: Tensor, lengths: Sequence[int]) -> None:
        """Completes `rows`, one for each rank, of which this rank has filled its own; `lengths` says how
        many elements of each row count. NCCL's collective can be captured in a CUDA graph, and takes
        whole rows; Gloo, whose all-gather is slower than its broadcasts, sends what counts only."""
        if self.backend == "none":
            return
        if self.backend == "nccl":
            own = rows[self.rank]
            self.watched("all-gather", lambda: all_gather_flat(rows.view(-1), own))
            return

        def send() -> None:
            under_way = [
                dist.broadcast(rows[r, :length], src=r, async_op=True)
                for r, length in enumerate(lengths)
                if length
            ]
            for work in under_way:
                assert work is not None
                work.wait()

        self.watched("all-gather", send)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank."""
        if self.backend == "none":
            assert data is not None
            return data
        length = torch.tensor([len(data) if data is not None else 0], device=self.device)
        self.broadcast(length)
        if data is not None and self.rank == 0:
            content = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8).to(self.device)
        else:
            content = torch.empty(max(1, int(length)), dtype=torch.uint8, device=self.device)
        self.broadcast(content)
        return content.cpu().numpy().tobytes()[: int(length)]

    def gather(self, row: Tensor) -> Tensor | None:
        """Every rank's `row`, one beneath the other, on rank 0's CPU; None elsewhere."""
        if self.backend == "none":
            return row.detach().cpu()[None].clone()
        rows = [torch.empty_like(row) for _ in range(self.world_size)] if self.rank == 0 else None
        self.completed("gather", lambda: dist.gather(row.contiguous(), rows, dst=0))
        # One by one: a stack on the device would take its memory twice.
        return torch.stack([own.cpu() for own in rows]) if rows is not None else None

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Every rank's bytes, in order of rank, on rank 0; None elsewhere."""
        lengths = self.gather(torch.tensor([len(data)], device=self.device))
        longest = int(lengths.max()) if lengths is not None else 0
        width = int(self.broadcast_bytes(str(longest).encode()))
        row = torch.zeros(max(1, width), dtype=torch.uint8)
        row[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[
            : len(data)
        ]
        # Piece by piece: rank 0's device holds a piece of every rank at a time, not all their bytes.
        piece = max(1, _GATHERED_BYTES // self.world_size)
        parts = [self.gather(own.to(self.device)) for own in torch.split(row, piece)]
        if lengths is None:
            return None
        found = [bytearray() for _ in range(self.world_size)]
        for part in parts:
            assert part is not None
            for own, content in zip(found, part, strict=True):
                own += content.numpy().tobytes()
        sizes = lengths.flatten().tolist()
        return [bytes(own[:size]) for own, size in zip(found, sizes, strict=True)]
