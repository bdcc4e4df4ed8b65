"""Transports with process groups of their own, for plans of several buckets, algorithms or formats.

`NativeTransport` is NCCL's all-reduce on NCCL's stream, where every algorithm is native;
`ThreadTransport` runs the plan's algorithms on the communication thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group import Group
from paceline.comm.hybrid import PlannedAllReduce, WireFormat
from paceline.comm.memory import Memory
from paceline.comm.process_groups import ProcessGroups
from paceline.comm.settings import BACKEND_GRACE_S, CommSettings
from paceline.comm.transport import Notify, Piece, Transport, Wait
from paceline.core.errors import CommError
from paceline.plan.fusion_plan import FusionPlan


class NativeTransport(Transport):
    """NCCL's all-reduce on NCCL's stream, beside the backward pass.

    The stream of whoever waits, waits; the host never does, so a CUDA graph can hold both. A process
    group of its own keeps its order apart from collectives of the default group.
    """

    overlaps = True
    capturable = True

    def __init__(self, group: Group, groups: ProcessGroups) -> None:
        self._group = group
        self._groups = groups
        # Several messages are under way at once: each has memory for its wire format.
        self._wires: dict[tuple[int, int], Tensor] = {}

    def send(self, pieces: Sequence[Piece], begun: Notify, ended: Notify) -> Wait:
        begun()
        under_way = [self._start(piece) for piece in pieces]

        def wait() -> None:
            for work, travelling, piece in under_way:
                if work is not None:
                    self._group.watched("all-reduce", work.wait)
                if travelling is not piece.tensor:
                    piece.tensor.copy_(travelling)
            ended()

        return wait

    def _start(self, piece: Piece) -> tuple[Any, Tensor, Piece]:
        travelling = piece.tensor
        dtype = WireFormat.for_tensor(piece.tensor, piece.wire).dtype
        if dtype != travelling.dtype:
            travelling = self._wire(piece.tensor, dtype)
            travelling.copy_(piece.tensor)
        if self._groups.world is None or not travelling.numel():
            return None, travelling, piece
        work: Any = self._group.watched(
            "all-reduce",
            lambda: dist.all_reduce(travelling, group=self._groups.world, async_op=True),
        )
        return work, travelling, piece

    def _wire(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        key = (tensor.data_ptr(), tensor.numel())
        if key not in self._wires:
            self._wires[key] = torch.empty_like(tensor, dtype=dtype)
        return self._wires[key]

    def close(self) -> None:
        self._groups.close()


class ThreadTransport(Transport):
    """The communication thread runs each message by the algorithm and in the format of the plan.

    A gradient is a share of the global batch's mean already, so its sum needs no room for the number of
    ranks. The thread reads GPU memory once backward's stream has filled it, and the stream that goes on
    waits for the sum.
    """

    overlaps = True

    def __init__(self, group: Group, planned: PlannedAllReduce) -> None:
        self._group = group
        self.planned = planned
        self._under_way = 0

    @property
    def memory(self) -> Memory | None:
        return self.planned.memory

    def send(self, pieces: Sequence[Piece], begun: Notify, ended: Notify) -> Wait:
        def run() -> Tensor:
            begun()
            for piece in pieces:
                self.planned.carry(piece.tensor, piece.algorithm, piece.wire)
            ended()
            return pieces[0].tensor

        future = self.planned.queue(run, pieces[0].tensor.device)
        self._under_way += 1

        def wait() -> None:
            try:
                future.wait()
            except RuntimeError as error:
                # The future only has the message; the error's type matters too.
                cause = self.planned.failure
                if isinstance(cause, CommError):
                    raise self._group.peer_error(cause) from cause
                raise cause or error from error
            self._under_way -= 1

        return wait

    def close(self) -> None:
        """A thread that may be stuck in a message is left behind, being a daemon; one that has
        failed is not, and its connections are closed, so that the other ranks notice."""
        if self._under_way == 0 or self.planned.failure is not None:
            self.planned.close()


def create_planned(
    group: Group, settings: CommSettings, plan: FusionPlan, *, native: bool
) -> Transport:
    """`native`: all algorithms of the plan are the backend's own. All ranks call this at once."""
    only_world = native and group.backend == "nccl"
    groups = ProcessGroups(
        group.topology,
        settings.group_size or None,
        timeout_s=settings.timeout_s,
        grace_s=BACKEND_GRACE_S,
        subgroups=False if only_world else None,
        algorithms={a for b in plan.buckets for a in (b.algorithm, b.beside_algorithm)},
    )
    if only_world:
        return NativeTransport(group, groups)
    # The first collective of the new groups, while all ranks are at the same point.
    groups.check_same({"the fusion plan": plan.fingerprint})
    wires = {bucket.wire for bucket in plan.buckets}
    return ThreadTransport(group, PlannedAllReduce(groups, wires, settings))
