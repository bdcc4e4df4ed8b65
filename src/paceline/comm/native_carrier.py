"""`NativeCarrier`: NCCL's own all-reduce, on NCCL's stream, beside the backward pass.

In: the pieces of a buffer, from whichever thread backward runs on. Out: their sums, once the stream of
whoever waits has waited. No host waits, so a CUDA graph can hold both. A group of its own keeps its
order apart from what the default group does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.carrier import Piece, Tell, Wait
from paceline.comm.group import Group
from paceline.comm.process_groups import ProcessGroups
from paceline.comm.wire import WireFormat


class NativeCarrier:
    """For plans whose every algorithm is `native`."""

    name = "native"
    overlaps = True
    recordable = True

    def __init__(self, group: Group, groups: ProcessGroups) -> None:
        self._group = group
        self._groups = groups
        # Several messages are on their way at once: each has memory for its wire format.
        self._wires: dict[tuple[int, int], Tensor] = {}

    def send(self, pieces: Sequence[Piece], begun: Tell, ended: Tell) -> Wait:
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
        work: Any = None

        def start() -> None:
            nonlocal work
            work = dist.all_reduce(travelling, group=self._groups.world, async_op=True)

        self._group.watched("all-reduce", start)
        return work, travelling, piece

    def _wire(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        key = (tensor.data_ptr(), tensor.numel())
        if key not in self._wires:
            self._wires[key] = torch.empty_like(tensor, dtype=dtype)
        return self._wires[key]

    def close(self) -> None:
        self._groups.close()
