"""`Executor`: runs all-reduce algorithms, the schedules of `paceline.plan`, with torch.distributed.

The input is the name of an algorithm and, on every rank, a contiguous 1-D tensor of the same size and
dtype. The tensor is replaced by the sum over ranks, which is bit-identical on all ranks.

A buffer is divided into segments, which are summed independently. Gloo sends a message only after the
receiver has asked for it. So all receives of a segment are posted before the segment's first round.
Several segments are in progress at once, each with its own message tag. NCCL runs messages in the
order in which they were posted. So with NCCL a buffer is one segment, and sends are delayed until a
round receives: sends and receives are then posted in one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline.comm.collectives import all_gather_flat, reduce_scatter_flat
from paceline.comm.process_groups import ProcessGroups
from paceline.core.errors import CommError
from paceline.plan.schedules import NATIVE, algorithm, check_name
from paceline.plan.steps import (
    Algorithm,
    Arrival,
    Collective,
    Departure,
    Groups,
    Op,
    Program,
    Receive,
    Segment,
    Send,
    Span,
    compile_rounds,
    interleave,
)

FORMATS = (torch.float32, torch.float16, torch.bfloat16)
# Number of elements of a buffer that every algorithm treats as a long buffer.
_LONG = 1 << 24
# Number of compiled programs that are kept; a training has segments of a few dozen sizes.
_KEPT_PROGRAMS = 512


def check_buffer(buffer: Tensor) -> None:
    """Raises CommError if `buffer` cannot be sent as one message."""
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise CommError(
            f"all-reduce received a tensor of shape {tuple(buffer.shape)} and strides "
            f"{buffer.stride()}: a buffer must be 1-D and contiguous",
            "pass tensor.contiguous().view(-1), or a view of a flat buffer",
        )
    if buffer.dtype not in FORMATS:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FORMATS)
        raise CommError(
            f"all-reduce does not support {str(buffer.dtype).removeprefix('torch.')}",
            f"use one of: {known}",
        )


class Staging:
    """Reusable tensors for messages, identified by name. They stay allocated and grow on demand.

    The content of a returned tensor is undefined.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(
        self, name: str, length: int, dtype: torch.dtype, device: torch.device, *,
        pinned: bool = False,
    ) -> Tensor:  # fmt: skip
        """Returns a 1-D tensor of `length` elements in the reusable memory `name`.

        If `pinned` is True, the host memory is pinned, which makes copies from and to a GPU faster.
        """
        key = (name, dtype, device)
        held = self._tensors.get(key)
        if held is None or held.numel() < length:
            held = torch.empty(length, dtype=dtype, device=device, pin_memory=pinned)
            self._tensors[key] = held
        return held[:length]


class Executor:
    """Runs all-reduce algorithms on the process groups `groups`.

    Every rank calls the same methods in the same order, from one thread at a time.

    Args:
        groups: The process groups.
        batched: Post each round's messages in one batch. None, the default, means True for NCCL only.
    """

    def __init__(self, groups: ProcessGroups, *, batched: bool | None = None) -> None:
        self.groups = groups
        self.staging = Staging()
        self._layout = groups.layout
        self._batched = groups.backend == "nccl" if batched is None else batched
        self._programs: dict[tuple[str, Segment], Program] = {}
        # The prepared algorithms by name; the value for `native` is None.
        self._algorithms: dict[str, Algorithm | None] = {}

    def all_reduce(self, buffer: Tensor, name: str) -> None:
        """Replaces `buffer` by its sum over ranks.

        Args:
            buffer: A contiguous 1-D tensor of a type in `FORMATS`.
            name: The name of the algorithm.
        """
        check_buffer(buffer)
        chosen = self.prepare(name)
        world, length = self.groups.world, buffer.numel()
        if world is None or self.groups.world_size == 1 or length == 0:
            return
        if chosen is None:
            dist.all_reduce(buffer, group=world)
            return
        if self.groups.backend == "gloo" and buffer.device.type != "cpu":
            raise CommError(
                f"{name} over Gloo cannot send memory of {buffer.device}",
                "use HybridAllReduce, which copies it to the host",
            )
        item_bytes = buffer.element_size()
        whole = self._program(chosen, Segment(length, item_bytes))
        if whole.collectives:
            _run_collectives(self, buffer, whole.collectives)
            return
        # Without tags, as over NCCL, the messages of two segments cannot be distinguished.
        cuts = [(0, length)] if self._batched else chosen.segments(length, item_bytes)
        if len(cuts) == 1:
            self._run([buffer], [whole], 1)
            return
        width = len(self._layout.columns)
        programs = [
            self._program(chosen, Segment(stop - start, item_bytes, number % width))
            for number, (start, stop) in enumerate(cuts)
        ]
        segments = [buffer[start:stop] for start, stop in cuts]
        self._run(segments, programs, min(chosen.depth, len(cuts)))

    def _run(self, segments: list[Tensor], programs: list[Program], depth: int) -> None:
        lanes: dict[int, _Lane] = {}
        for segment, number, at in interleave([len(p.rounds) for p in programs], depth):
            program = programs[segment]
            if at == 0:
                lanes[number] = _Lane(self, segments[segment], program, number, self._batched)
            lanes[number].run(program.rounds[at])
            if at + 1 == len(program.rounds):
                lanes[number].finish()

    def prepare(self, name: str) -> Algorithm | None:
        """Opens NCCL's connections to all peers of an algorithm, unless this was done before.

        All ranks call this at the same point. NCCL connects two ranks at their first message, and both
        must then post matching sends and receives in one batch. The batches of an algorithm differ
        between ranks: the root of a tree first receives and later sends, but its children do both at
        once. So each pair of ranks connects in advance, with one message in each direction. All ranks
        process the pairs in the same order, so that no ranks wait for one another in a cycle.

        Returns:
            The algorithm, or None if the backend's own all-reduce is used.
        """
        if name in self._algorithms:
            return self._algorithms[name]
        check_name(name)
        chosen = self._algorithms[name] = None if name == NATIVE else algorithm(name)
        group, rank = self.groups.world, self.groups.rank
        if chosen is None or group is None or self.groups.backend != "nccl":
            return chosen
        device = torch.device("cuda", torch.cuda.current_device())
        out, into = torch.zeros(1, device=device), torch.zeros(1, device=device)
        peers = schedule_peers(chosen, rank, self._layout)
        for peer in sorted(peers, key=lambda peer: (min(rank, peer), max(rank, peer))):
            pair = [
                dist.P2POp(dist.isend, out, group=group, group_peer=peer),
                dist.P2POp(dist.irecv, into, group=group, group_peer=peer),
            ]
            for work in dist.batch_isend_irecv(pair):
                work.wait()
        return chosen

    def _program(self, chosen: Algorithm, segment: Segment) -> Program:
        key = (chosen.name, segment)
        program = self._programs.get(key)
        if program is None:
            if len(self._programs) >= _KEPT_PROGRAMS:
                self._programs.clear()
            program = compile_rounds(chosen.rounds(self.groups.rank, self._layout, segment))
            self._programs[key] = program
        return program

    def part(self, members: Sequence[int]) -> ProcessGroup:
        """Returns the process group of `members`, a part of the ranks: a row, a column or the masters."""
        layout, rank = self._layout, self.groups.rank
        process_group: ProcessGroup | None
        if members == layout.row_of(rank):
            process_group = self.groups.row
        elif members == layout.masters:
            process_group = self.groups.masters
        else:
            process_group = self.groups.columns.get(layout.columns.index(tuple(members)))
        if process_group is None:
            raise CommError(
                f"no process group of ranks {members}", "create ProcessGroups with subgroups=True"
            )
        return process_group


def schedule_peers(chosen: Algorithm, rank: int, groups: Groups) -> set[int]:
    """Returns the ranks with which `rank` exchanges messages in an algorithm.

    Some algorithms run different rounds for short and for long buffers. The result includes the peers in
    both cases.
    """
    peers: set[int] = set()
    for length in (4 * len(groups.order), _LONG):
        for steps in chosen.rounds(rank, groups, Segment(length)):
            for step in steps:
                if isinstance(step, Send):
                    peers.add(step.peer)
                elif isinstance(step, Receive):
                    peers.update(step.peers)
    return peers


class _Lane:
    """The all-reduce of one segment of a buffer while it runs, with its own message tag."""

    def __init__(
        self, executor: Executor, segment: Tensor, program: Program, number: int, batched: bool
    ) -> None:
        assert executor.groups.world is not None
        self._group: ProcessGroup = executor.groups.world
        self._staging, self._segment, self._program = executor.staging, segment, program
        self._tag, self._batched = number, batched
        self._half = segment.element_size() == 2
        self._wide: Tensor | None = None
        self._views: dict[Span, Tensor] = {}
        self._copies = self._scratch("copies", program.copies) if program.copies else segment
        inbox = self._scratch("inbox", program.inbox) if program.inbox else segment
        self._into = [self._targets(arrival, inbox) for arrival in program.arrivals]
        self._next = 0
        self._sends: list[Any] = []
        self._held: list[dist.P2POp] = []
        self._works: list[list[Any]] = []
        if not batched:
            self._works = [
                [self._post(into, peer) for into, peer in zip(row, a.step.peers, strict=True)]
                for row, a in zip(self._into, program.arrivals, strict=True)
            ]

    def _scratch(self, name: str, length: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns memory for intermediate results, which this segment uses until it is complete."""
        like = self._segment
        place = f"{self._tag}.{name}"
        return self._staging.take(place, length, dtype or like.dtype, like.device)

    def _view(self, span: Span) -> Tensor:
        """Returns the elements `span` of this segment of the buffer, as a cached view."""
        view = self._views.get(span)
        if view is None:
            view = self._views[span] = self._segment[span[0] : span[1]]
        return view

    def _targets(self, arrival: Arrival, inbox: Tensor) -> list[Tensor]:
        """Returns the tensors into which the messages of the receive `arrival` are written."""
        step, first = arrival.step, arrival.inbox
        if not step.add:
            return [self._view(step.span)]
        each = step.span[1] - step.span[0]
        return [inbox[first + each * at : first + each * (at + 1)] for at in range(len(step.peers))]

    def _post(self, tensor: Tensor, peer: int) -> Any:
        return dist.irecv(tensor, group=self._group, group_src=peer, tag=self._tag)

    def run(self, ops: Sequence[Op]) -> None:
        for op in ops:
            if isinstance(op, Departure):
                self._send(op)
            elif isinstance(op, Arrival):
                self._receive(op)
            elif self._half:
                self._view(op.span).copy_(self._sums(op.span))

    def finish(self) -> None:
        """Waits until all sends are complete, so that their memory can be reused."""
        self._flush(())
        for work in self._sends:
            work.wait()

    def _send(self, op: Departure) -> None:
        peer, span = op.step
        tensor = self._view(span)
        if op.copy is not None:
            copy = self._copies[op.copy : op.copy + tensor.numel()]
            tensor = copy.copy_(tensor) if op.fill else copy
        if self._batched:
            self._held.append(self._op(dist.isend, tensor, peer))
        else:
            self._sends.append(dist.isend(tensor, group=self._group, group_dst=peer, tag=self._tag))

    def _op(self, kind: Any, tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, group=self._group, group_peer=peer, tag=self._tag)

    def _flush(self, numbers: Sequence[int]) -> None:
        batch = self._held
        for number in numbers:
            peers = self._program.arrivals[number].step.peers
            for into, peer in zip(self._into[number], peers, strict=True):
                batch.append(self._op(dist.irecv, into, peer))
        self._held = []
        if batch:
            for work in dist.batch_isend_irecv(batch):
                work.wait()

    def _receive(self, op: Arrival) -> None:
        number, self._next = self._next, self._next + 1
        if self._batched and op.batch:
            self._flush(op.batch)
        step = op.step
        if len(step.peers) > 1:
            self._add(step, self._arrivals(number))
            return
        if not self._batched:
            self._works[number][0].wait()
        if step.wide:
            self._sums(step.span).add_(self._into[number][0])
        elif step.add:
            # Torch adds two 16-bit values in fp32 and rounds once, so an fp32 buffer is not needed.
            self._view(step.span).add_(self._into[number][0])

    def _arrivals(self, number: int) -> Iterator[Tensor]:
        """Yields the received messages in order, each as soon as it has arrived."""
        for at, tensor in enumerate(self._into[number]):
            if not self._batched:
                self._works[number][at].wait()
            yield tensor

    def _add(self, step: Receive, arrivals: Iterator[Tensor]) -> None:
        """Adds the messages of several peers; sums 16-bit values in fp32 and rounds the sum once."""
        own, place = self._view(step.span), step.own
        if step.wide:
            for arrival in arrivals:
                self._sums(step.span).add_(arrival)
            return
        if place == 0 and not self._half:
            for arrival in arrivals:
                own.add_(arrival)
            return
        total = self._scratch("sum", own.numel(), torch.float32)
        total.copy_(own if place == 0 else next(arrivals))
        for at in range(1, len(step.peers) + 1):
            total.add_(self._in_fp32(own if at == place else next(arrivals)))
        own.copy_(total)

    def _in_fp32(self, tensor: Tensor) -> Tensor:
        """Returns `tensor` in fp32.

        Torch's `add_` of a 16-bit to an fp32 tensor takes 2.5 times as long on CPUs.
        """
        if not self._half:
            return tensor
        return self._scratch("in fp32", tensor.numel(), torch.float32).copy_(tensor)

    def _sums(self, span: Span) -> Tensor:
        """Returns the fp32 sums of elements `span`: a view of the segment if the segment is fp32."""
        if not self._half:
            return self._view(span)
        low, high = self._program.wide
        if self._wide is None:
            self._wide = self._scratch("wide", high - low, torch.float32)
            self._wide.copy_(self._segment[low:high])
        return self._wide[span[0] - low : span[1] - low]


def _run_collectives(executor: Executor, buffer: Tensor, steps: Sequence[Collective]) -> None:
    """All-reduces a buffer by the backend's collectives in rows, columns or among the masters."""
    length, needed = buffer.numel(), max(step.span[1] for step in steps)
    whole = buffer
    if needed > length:
        whole = executor.staging.take("padded", needed, buffer.dtype, buffer.device)
        whole[:length].copy_(buffer)
        whole[length:].zero_()
    # The span and the values that the reduce-scatter has left on this rank.
    own_span, own = (0, 0), whole[:0]
    for step in steps:
        group, (low, high) = executor.part(step.members), step.span
        if step.kind == "reduce":
            dist.reduce(whole[low:high], dst=step.members[0], group=group)
        elif step.kind == "broadcast":
            dist.broadcast(whole[low:high], src=step.members[0], group=group)
        elif step.kind == "reduce_scatter":
            each = (high - low) // len(step.members)
            at = step.members.index(executor.groups.rank)
            own_span = (low + each * at, low + each * (at + 1))
            own = executor.staging.take("own", each, whole.dtype, whole.device)
            reduce_scatter_flat(own, whole[low:high], group=group)
        elif step.kind == "all_gather":
            all_gather_flat(whole[low:high], own, group=group)
        else:
            dist.all_reduce(own if own_span == step.span else whole[low:high], group=group)
    if whole is not buffer:
        buffer.copy_(whole[:length])
