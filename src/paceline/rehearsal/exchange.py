"""`RehearsedExchange`: the gradient all-reduce of many ranks in one process.

The ranks of the cluster are virtual: this process computes their gradients one rank after the
other, and calls `end_rank` after each. Each bucket is rounded to its wire format and added to the
partial sums of earlier ranks, in the order and with the roundings of the plan's algorithm
(`reduction`). So the sums are bit-identical to those on the cluster. `reduce` then writes the sums
to the gradient buffers, like an all-reduce over a network.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from paceline.comm.exchange import SIGNALS, GradientExchange, Message, Signals
from paceline.comm.group import Group
from paceline.comm.planned_transport import WireFormat
from paceline.comm.process_groups import group_ranks
from paceline.comm.transport import DirectTransport, Piece
from paceline.core.units import format_bytes
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.schedules import NATIVE
from paceline.plan.steps import Groups
from paceline.rehearsal.reduction import ROW, WIDE, Plane, Reduction, compile_reduction


def cluster_groups(nodes: int, ranks_per_node: int, group_size: int = 0) -> Groups:
    """Returns the groups of ranks between which hierarchical all-reduces communicate.

    Args:
        nodes: Number of nodes.
        ranks_per_node: Number of ranks on each node.
        group_size: The setting `comm.group_size`: ranks in a group; 0 means all ranks of a node.
    """
    node_of_rank = [rank // ranks_per_node for rank in range(nodes * ranks_per_node)]
    return Groups(group_ranks(node_of_rank, group_size or None))


def rank_order(ranks: int, plan: FusionPlan) -> range:
    """Returns the order in which to compute the ranks, so that few partial sums must be kept.

    Gloo's own ring adds ranks in descending order, and Paceline's algorithms add them in ascending
    order. The sums do not depend on the order in which ranks are computed.
    """
    native = all(bucket.algorithm == NATIVE for bucket in plan.buckets)
    return range(ranks - 1, -1, -1) if native else range(ranks)


class VirtualAllReduce:
    """Sums a buffer over virtual ranks, each of which is added as soon as it is computed."""

    def __init__(self, reduction: Reduction, dtype: torch.dtype, device: torch.device) -> None:
        self._reduction = reduction
        self._planes: dict[Plane, tuple[int, Tensor]] = {}
        for plane, (start, stop) in reduction.planes.items():
            kind = torch.float32 if plane[0] == WIDE else dtype
            self._planes[plane] = (start, torch.empty(stop - start, dtype=kind, device=device))
        self._come = 0

    @property
    def held_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self._planes.values())

    def begin(self) -> None:
        """Starts a new sum, to which no rank has been added."""
        self._come = 0

    def add(self, row: Tensor) -> None:
        """Adds `row`, the buffer of the next rank, which the caller may then overwrite."""
        for into, term, first, adds, start, stop in self._reduction.arrivals[self._come]:
            target, value = self._part(into, start, stop), self._part(term, start, stop, row)
            if first is not None:
                target.copy_(self._part(first, start, stop, row))
            if not adds:
                target.copy_(value)
            elif target.dtype != value.dtype:
                # Converting first is faster on the CPU than torch's addition of mixed formats.
                target.add_(value.to(target.dtype))
            else:
                target.add_(value)
        self._come += 1

    def result(self, into: Tensor) -> None:
        """Writes the sum to `into`. All ranks must have been added."""
        assert self._come == len(self._reduction.arrivals), "ranks are missing"
        for plane, start, stop in self._reduction.result:
            into[start:stop].copy_(self._part(plane, start, stop))

    def _part(self, plane: Plane, start: int, stop: int, row: Tensor | None = None) -> Tensor:
        if plane[0] == ROW:
            assert row is not None
            return row[start:stop]
        first, tensor = self._planes[plane]
        return tensor[start - first : stop - first]


class RehearsedExchange(GradientExchange):
    """Sums the gradients of virtual ranks in one process, in place of an all-reduce over a network.

    In a step, the caller first calls `begin`. Then it runs, for each rank in `order`, the
    micro-steps of that rank and calls `end_rank`. At the end it calls `reduce`.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        group: Group,
        plan: FusionPlan,
        groups: Groups,
        *,
        accumulate: bool = False,
        squares: bool = False,
    ) -> None:
        super().__init__(
            parameters, group, plan, accumulate=accumulate, transport=DirectTransport(group),
            overlap=False, squares=squares,
        )  # fmt: skip
        self.order = rank_order(len(groups.order), plan)
        self._come = 0
        self._wires: dict[tuple[int, torch.dtype], Tensor] = {}
        made: dict[tuple[str, int, int], Reduction] = {}
        self._reduces = [
            [self._virtual(message, groups, made) for message in bucket] for bucket in self.messages
        ]

    def _virtual(
        self, message: Message, groups: Groups, made: dict[tuple[str, int, int], Reduction]
    ) -> VirtualAllReduce:
        length = message.stop - message.start
        wire = self._wire(message)
        key = (message.algorithm, length, wire.itemsize)
        if key not in made:
            made[key] = compile_reduction(
                message.algorithm, groups, length, wire.itemsize, order=self.order,
                segmented=self.group.device.type != "cuda",
            )  # fmt: skip
        return VirtualAllReduce(made[key], wire, self.group.device)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory for the partial sums of all buckets."""
        return sum(reduce.held_bytes for bucket in self._reduces for reduce in bucket)

    @property
    def note(self) -> str:  # type: ignore[override]
        return f"{len(self.order):,} virtual ranks, {format_bytes(self.held_bytes)} of partial sums"

    def begin(self, step: int = 0) -> None:
        super().begin(step)
        self._come = 0
        for bucket in self._reduces:
            for reduce in bucket:
                reduce.begin()

    def end_rank(self, loss: Tensor) -> None:
        """Adds the gradients of the current rank to the sums, after the rank's last micro-step.

        `loss` is the loss of that rank. Afterwards, the next rank of `order` is the current one.
        """
        self._write_tail(loss, Signals())
        for number, bucket in enumerate(self._reduces):
            for reduce, piece in zip(bucket, self._pieces(number), strict=True):
                reduce.add(self._travelling(piece))
        self._come += 1
        self._forget()

    def reduce(self, loss: Tensor, signals: Signals) -> None:
        """Writes the summed gradients of all ranks to the gradient buffers, and passes on `signals`.

        If a rank is missing because of a failure or a stop, the buffers are set to 0, and the
        signals report the reason.
        """
        complete = self._come == len(self.order)
        if not complete:
            for buffer in self.buffers.values():
                buffer.zero_()
        for messages, bucket in zip(self.messages, self._reduces, strict=True):
            for message, reduce in zip(messages, bucket, strict=True):
                if complete:
                    reduce.result(self.buffers[message.dtype][message.start : message.stop])
        own = [getattr(signals, name) for name in SIGNALS]
        if any(own):  # the first element of the tail is the summed loss, which stays
            values = torch.tensor(own[1:], pin_memory=self.tail.is_cuda)
            self.tail[1 : len(SIGNALS)].copy_(values, non_blocking=True)
        self._publish(0.0)

    def _wire(self, message: Message) -> torch.dtype:
        name = message.dtype if message.wire == "auto" else message.wire
        return WireFormat.named(name, scaled=False).dtype

    def _travelling(self, piece: Piece) -> Tensor:
        wire = WireFormat.for_tensor(piece.tensor, piece.wire)
        if wire.dtype == piece.tensor.dtype:
            return piece.tensor
        key = (piece.tensor.data_ptr(), wire.dtype)
        if key not in self._wires:
            self._wires[key] = torch.empty_like(piece.tensor, dtype=wire.dtype)
        wire.encode(piece.tensor, self._wires[key])
        return self._wires[key]
