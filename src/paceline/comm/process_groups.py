"""`ProcessGroups`: the torch.distributed groups that the communication thread has for itself.

In: this rank's `Topology`, perhaps k, and a timeout; the default group must exist, or the process be
alone. Out: the agreed `GroupLayout`, a group of all ranks for messages, and, where the backend's own
collectives run in parts of the cluster (NCCL), groups for this rank's row, its columns and the masters.
All ranks create them at once, in one order, or all raise the same error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from paceline.comm.group_layout import GroupLayout, Place
from paceline.core.errors import CommError
from paceline.core.topology import Topology


class ProcessGroups:
    """Groups apart from the default one, so that what the main thread sends cannot get between."""

    def __init__(
        self,
        topology: Topology,
        k: int | None = None,
        *,
        timeout_s: float = 600.0,
        grace_s: float = 0.0,
        subgroups: bool | None = None,
    ) -> None:
        """`grace_s`: how much longer the backend waits, where a watchdog keeps `timeout_s`.
        `subgroups`: None makes them where the backend is NCCL. Over Gloo the explicit algorithms
        need the group of all ranks only, and each further group is a mesh of sockets."""
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
            self.layout = GroupLayout(((0,),))
            return
        self.backend = str(dist.get_backend())
        self.layout = _agree(topology, k, timeout_s)
        self.world = self._make(self.layout.order)
        if self.backend == "nccl" if subgroups is None else subgroups:
            self._make_parts()

    @property
    def has_parts(self) -> bool:
        """Whether rows, columns and masters have groups of their own."""
        return self.row is not None

    def _make_parts(self) -> None:
        # Every rank goes through all of them, members or not: torch counts groups to name them.
        for row in self.layout.groups:
            self.row = self._make(row) or self.row
        for number, column in enumerate(self.layout.columns):
            made = self._make(column)
            if made is not None:
                self.columns[number] = made
        self.masters = self._make(self.layout.masters)

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


def _agree(topology: Topology, k: int | None, timeout_s: float) -> GroupLayout:
    """The layout, from what all ranks say; every rank reads the same words, so all fail alike."""
    place = Place(
        topology.rank,
        topology.world_size,
        topology.node_rank,
        topology.local_rank,
        topology.local_world_size,
    )
    facts = {"comm.group_size": k, "comm.timeout_s": timeout_s}
    said = all_gather_json([astuple(place), facts])
    words = [(Place(*theirs), found) for theirs, found in said]
    _compare([theirs for _, theirs in words])
    for rank, (found, _) in enumerate(words):
        if found.rank != rank:
            raise CommError(
                f"rank {rank} of torch.distributed is rank {found.rank} in its topology",
                "check the launcher's environment variables",
            )
    return GroupLayout.from_places([found for found, _ in words], k)


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


def _compare(said: Sequence[Mapping[str, object]]) -> None:
    for rank, theirs in enumerate(said):
        for name, first in said[0].items():
            if theirs.get(name) != first:
                raise CommError(
                    f"ranks differ in {name}: {first} on rank 0, {theirs.get(name)} on rank {rank}",
                    "start every rank with the same settings",
                )
