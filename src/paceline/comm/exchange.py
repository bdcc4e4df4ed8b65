"""`GradientExchange`: sums the gradients of all ranks, in the buckets of a `FusionPlan`.

There is one flat buffer per dtype, with the gradients in the plan's order. A step calls `begin`. Each
micro-step then runs backward and calls `gather`, which moves `.grad` into the buffers; the last
micro-step calls `arm` before backward. At the end the step calls `reduce`. The gradients of several
micro-steps are summed in fp32 and rounded once. After `reduce`, each `.grad` is a view of the sum over
all ranks. A few `Signals` are summed in the last bucket, so that stopping, failing and counting need
no messages of their own.

If the transport supports overlap, the exchange sends each bucket during the backward pass after `arm`,
as soon as backward has filled it and all earlier buckets of the plan. `reduce` sends the remaining
buckets and waits. A micro-step can be captured in a CUDA graph: `capture` and `replay` update the
Python state of the exchange accordingly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.comm.memory import Memory
from paceline.comm.progress import BucketInfo, ExchangeObserver
from paceline.comm.tracing import ExposedTime, Reading
from paceline.comm.transport import DirectTransport, Piece, Transport, Wait
from paceline.core.errors import RunError
from paceline.plan.fusion_plan import FlatLayout, FusionPlan, Slot, TensorSpec, padded
from paceline.plan.wires import wire_bytes


@dataclass(frozen=True)
class Message:
    """One all-reduce of a step, of elements `start` to `stop` − 1 of the flat buffer of `dtype`."""

    dtype: str
    start: int
    stop: int
    algorithm: str
    wire: str

    @property
    def wire_bytes(self) -> int:
        """Returns the size of the message in the number format in which it is sent."""
        return wire_bytes(self.stop - self.start, self.dtype, self.wire)


def plan_messages(
    plan: FusionPlan, layouts: Mapping[str, FlatLayout], tail: int
) -> list[list[Message]]:
    """Returns the messages of each bucket: one for each dtype of the bucket's gradients.

    The last bucket also sends the signals, always in fp32: inside its fp32 message if there is one,
    otherwise in a separate message.

    Args:
        plan: The fusion plan.
        layouts: The layout of the flat buffer of each dtype, with tensors in the plan's order.
        tail: Number of elements for the signals at the end of the float32 buffer.
    """
    messages: list[list[Message]] = []
    for bucket in plan.buckets:
        names = set(bucket.tensors)
        pieces = []
        for dtype, layout in layouts.items():
            slots = [slot for slot in layout.slots if slot.name in names]
            if slots:
                # Padding is sent too, so that every message starts and ends at an aligned offset.
                end = padded(slots[-1].stop)
                start = slots[0].offset
                pieces.append(Message(dtype, start, end, bucket.algorithm, bucket.wire))
        bulk = max(pieces, key=lambda piece: piece.wire_bytes, default=None)
        messages.append(
            [p if p is bulk else replace(p, algorithm=bucket.beside_algorithm) for p in pieces]
        )
    _add_tail(messages[-1], layouts["float32"].length, tail, plan.buckets[-1].beside_algorithm)
    return messages


def _add_tail(last: list[Message], length: int, tail: int, algorithm: str) -> None:
    for number, piece in enumerate(last):
        if (piece.dtype, piece.stop) == ("float32", length) and piece.wire in ("auto", "float32"):
            last[number] = replace(piece, stop=length + tail)
            return
    last.append(Message("float32", length, length + tail, algorithm, "float32"))


@dataclass(frozen=True)
class Signals:
    """Numbers of one rank that are summed over all ranks together with the gradients of a step.

    With these sums all ranks learn in the same step that a rank has failed or was asked to stop.
    """

    loss: float = 0.0
    corrupt: float = 0.0
    fault: float = 0.0
    abandon: float = 0.0
    # A rank was asked to save and continue.
    save: float = 0.0
    # A callback asked to stop.
    request: float = 0.0
    # A rank was asked to stop, by SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2.
    interrupt: float = 0.0
    terminate: float = 0.0
    hangup: float = 0.0
    user1: float = 0.0
    user2: float = 0.0


SIGNALS = tuple(field.name for field in fields(Signals))


class GradientExchange:
    """Sums gradients over ranks, in flat buffers that it allocates.

    Args:
        parameters: Names and parameters of the model. Parameters that are not trained are ignored.
        group: The group of all ranks.
        plan: The fusion plan. The default is one bucket.
        accumulate: True if a step may have more than one micro-step.
        transport: The object that sums the buckets over ranks. The default is the backend's own
            all-reduce.
        overlap: Send full buckets during backward, if the transport supports this.
        squares: Also sum the squared gradient norms of all micro-steps, to estimate the gradient noise
            scale.
    """

    # If not empty, this text replaces the statement in descriptions about when buckets are sent.
    note = ""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        group: Group,
        plan: FusionPlan | None = None,
        *,
        accumulate: bool = False,
        transport: Transport | None = None,
        overlap: bool = True,
        squares: bool = False,
    ) -> None:
        self.group = group
        self.transport: Transport = transport or DirectTransport(group)
        # Callers may change the list between steps.
        self.observers: list[ExchangeObserver] = []
        self._exposed = ExposedTime(group.device)
        self._trained = {name: p for name, p in parameters if p.requires_grad}
        # Backward computes the gradients of the last layer first.
        self.plan = plan or FusionPlan.single(tuple(reversed(self._trained)))
        self.plan.check(tuple(self._trained))
        self.names = self.plan.tensors
        self.layouts = flat_layouts([(name, self._trained[name]) for name in self.names])
        tail = len(SIGNALS) + len(self.names) + squares
        self._squares = torch.zeros((), device=group.device) if squares else None
        self._allocate(tail, accumulate=accumulate)
        self.messages = plan_messages(self.plan, self.layouts, tail)
        # In this step: tensors with a gradient, number of sent buckets, functions that wait for them.
        self._used: set[str] = set()
        self._next = 0
        self._waits: list[Wait] = []
        # While armed: for each bucket, the tensors whose gradients are not ready.
        self._armed = False
        self._missing: list[set[str]] = []
        # State after a captured micro-step that sends buckets (True) or does not (False): the tensors
        # with a gradient, and the number of sent buckets.
        self._captured: dict[bool, tuple[frozenset[str], int]] = {}
        # The last bucket waits for the signals, so overlap cannot help if there is only one bucket.
        self.overlaps = overlap and self.transport.overlaps and len(self.messages) > 1
        self._hooks: list[Any] = []
        if self.overlaps:
            for number, bucket in enumerate(self.plan.buckets):
                for name in bucket.tensors:
                    hook = self._hook(name, number)
                    self._hooks.append(
                        self._trained[name].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    )

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Returns the parameters whose gradients are exchanged, by name."""
        return self._trained

    def _allocate(self, tail: int, *, accumulate: bool) -> None:
        """Allocates the buffers and their views, with `tail` elements after the float32 gradients."""
        device = self.group.device
        self.buffers: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}
        # By number format: name, start and stop of each tensor.
        self._places: dict[str, list[Slot]] = {}
        self._sums: dict[str, Tensor] = {}
        for dtype, layout in self.layouts.items():
            length = layout.length + (tail if dtype == "float32" else 0)
            kind = getattr(torch, dtype)
            self.buffers[dtype] = torch.zeros(length, dtype=kind, device=device)
            self._places[dtype] = list(layout.slots)
            for slot in layout.slots:
                parameter = self._trained[slot.name]
                self._views[slot.name] = self.buffers[dtype].as_strided(
                    parameter.shape, _dense_strides(parameter), slot.offset
                )
            if accumulate:
                self._sums[dtype] = torch.zeros(layout.length, device=device)
        self.tail = self.buffers["float32"][-tail:]
        self._own_tail = torch.zeros(tail, device=device)
        self._sent_tail: tuple[float, ...] = (0.0,) * tail

    @property
    def uses(self) -> Tensor:
        """Returns for each tensor of the plan how many ranks had a gradient. Valid after `reduce`."""
        return self.tail[len(SIGNALS) : len(SIGNALS) + len(self.names)]

    @property
    def squares(self) -> Tensor | None:
        """Returns the sum of the squared gradient norms of all micro-steps. Valid after `reduce`."""
        return None if self._squares is None else self.tail[-1]

    @property
    def exposed(self) -> Reading:
        """Returns a function that reads how many seconds the last step waited for its all-reduces.

        On a GPU the function may only be called after the device has completed that step.
        """
        return self._exposed.reading

    @property
    def sent(self) -> int:
        """Returns the number of buckets of this step that have been sent."""
        return self._next

    @property
    def memory(self) -> Memory | None:
        """Returns the state that the transport keeps between steps (see `Memory`), or None."""
        return self.transport.memory

    def bucket_info(self) -> list[BucketInfo]:
        """Returns the buckets of the plan, with the number of bytes that each sends."""
        return [
            BucketInfo(sum(m.wire_bytes for m in messages), b.algorithm, b.tensors, b.wire)
            for b, messages in zip(self.plan.buckets, self.messages, strict=True)
        ]

    def begin(self, step: int = 0) -> None:
        """Prepares the exchange for optimizer step `step`. Called before its first micro-step."""
        self._next = 0
        self._waits.clear()
        self._forget()
        for observer in self.observers:
            observer.step_begun(step)

    def arm(self) -> None:
        """Allows the next backward pass, the last one of a step, to send full buckets."""
        if self.overlaps:
            self._armed = True
            self._missing = [set(bucket.tensors) for bucket in self.plan.buckets]

    def gather(self) -> None:
        """Moves the gradients of unsent buckets into the flat buffers and drops `.grad`."""
        self._armed = False
        for bucket in self.plan.buckets[: self._next]:
            for name in bucket.tensors:
                if self._trained[name].grad is not None:
                    raise RunError(
                        f"backward gave {name} a second gradient after its bucket had been sent",
                        "use --set comm.overlap=off",
                    )
        self._fill({name for bucket in self.plan.buckets[self._next :] for name in bucket.tensors})

    def reduce(self, loss: Tensor, signals: Signals) -> None:
        """Sums gradients and signals over all ranks. Does not wait until the device has finished."""
        self._armed = False
        self._write_tail(loss, signals)
        self._exposed.begin()
        while self._next < len(self.messages):
            self._send()
        self.join()
        self._exposed.end()
        self._publish(self._exposed.last_s)

    def _forget(self) -> None:
        """Resets the record of gathered gradients and sent buckets."""
        self._used.clear()
        self._drop_grads(self._trained)
        for total in self._sums.values():
            total.zero_()
        if self._squares is not None:
            self._squares.zero_()

    def _write_tail(self, loss: Tensor, signals: Signals) -> None:
        """Writes this rank's signals, and which tensors have a gradient, into the last bucket."""
        own = (
            *(getattr(signals, name) for name in SIGNALS),
            *(float(name in self._used) for name in self.names),
            *(() if self._squares is None else (0.0,)),
        )
        if own != self._sent_tail:
            # In most steps the values do not change and are not copied. Pinned memory makes the copy
            # asynchronous.
            host = torch.tensor(own, pin_memory=self._own_tail.is_cuda)
            self._own_tail.copy_(host, non_blocking=True)
            self._sent_tail = own
        self.tail.copy_(self._own_tail)
        self.tail[0].copy_(loss)
        if self._squares is not None:
            self.tail[-1].copy_(self._squares)

    def _publish(self, waited_s: float) -> None:
        """Sets each parameter's `.grad` to its sum over ranks, a view of the flat buffer."""
        for name, view in self._views.items():
            self._trained[name].grad = view
        for observer in self.observers:
            observer.step_ended(waited_s)

    def join(self) -> None:
        """Waits for all sent buckets. The capture of a CUDA graph calls this before it ends."""
        while self._waits:
            self._waits.pop(0)()

    @contextmanager
    def capture(self, *, sends: bool) -> Iterator[None]:
        """Surrounds the capture of a micro-step in a CUDA graph and the graph's first replay.

        Records for `replay` which gradients the micro-step gathers and which buckets it sends. A
        capture only records kernels, so if it fails, nothing has been sent. The micro-step can then
        run without a graph.

        Args:
            sends: True if `arm` was called for the micro-step, so that it sends buckets.
        """
        sent, used = self._next, set(self._used)
        try:
            yield
        except Exception:
            self._armed = False
            self._next, self._used = sent, used
            self._waits.clear()
            self._drop_grads(self._trained)
            raise
        self._captured[sends] = (frozenset(self._used), self._next)

    def replay(self, *, sends: bool) -> None:
        """Updates the Python state of the exchange after the replay of a captured micro-step.

        The replay has written the gradients to the buffers. If `sends` is True, it has also sent the
        buckets of the micro-step.
        """
        gathered, self._next = self._captured[sends]
        self._used |= gathered

    def close(self) -> None:
        """Closes the transport. CUDA graphs that contain its collectives must already be destroyed."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.transport.close()

    def renew(self, transport: Transport, *, accumulate: bool) -> None:
        """Continues with another transport and new buffers, after the ranks of the group have changed.

        An abandoned collective may still write into the old buffers.

        Args:
            transport: Sums the buckets among the new ranks.
            accumulate: True if a step may now have more than one micro-step.
        """
        self.transport.abandon()
        self.transport = transport
        self._waits.clear()
        self._captured.clear()
        self._armed = False
        self._forget()
        self._allocate(self.tail.numel(), accumulate=accumulate)

    def _hook(self, name: str, number: int) -> Callable[[Tensor], None]:
        """Returns a hook for the gradient of parameter `name`, in bucket `number`.

        The hook sends the next buckets of the plan if they are full.
        """

        def ready(parameter: Tensor) -> None:
            if not self._armed:
                return
            self._missing[number].discard(name)
            while self._next < len(self.messages) - 1 and not self._missing[self._next]:
                self._fill(set(self.plan.buckets[self._next].tensors))
                self._send()

        return ready

    def _fill(self, names: set[str]) -> None:
        """Copies the gradients of `names` into the buffers, or adds them to existing fp32 sums."""
        for dtype, all_places in self._places.items():
            places = [place for place in all_places if place[0] in names]
            ready = [name for name, *_ in places if self._trained[name].grad is not None]
            if not ready:
                continue
            first, last = places[0][1], places[-1][2]
            piece = self.buffers[dtype][first:last]
            if self._sums and len(ready) < len(places):
                piece.zero_()  # old values must not be added again
            grads = [_dense(name, self._trained[name].grad) for name in ready]
            torch._foreach_copy_([self._views[name] for name in ready], grads)
            if self._squares is not None:
                # On CPUs in fp64: torch's fp32 norms of large tensors are inexact there.
                kind = torch.float32 if self._squares.is_cuda else torch.float64
                norms = torch._foreach_norm(grads, 2, dtype=kind)
                self._squares.add_(torch.stack(norms).square().sum())
            if self._sums:
                self._sums[dtype][first:last].add_(piece)
            self._used.update(ready)
        self._drop_grads(names)

    def _drop_grads(self, names: Iterable[str]) -> None:
        """Sets `.grad` to None, so that backward assigns new tensors instead of adding to old ones."""
        for name in names:
            self._trained[name].grad = None

    def _pieces(self, number: int) -> list[Piece]:
        """Returns the ranges of the flat buffers that make up bucket `number`."""
        for name in self.plan.buckets[number].tensors:
            if name not in self._used:
                self._views[name].zero_()
        pieces = []
        for message in self.messages[number]:
            piece = self.buffers[message.dtype][message.start : message.stop]
            total = self._sums.get(message.dtype)
            if total is not None:
                stop = min(message.stop, total.numel())
                piece[: stop - message.start].copy_(total[message.start : stop])
            pieces.append(Piece(piece, message.algorithm, message.wire))
        return pieces

    def _send(self) -> None:
        number, pieces = self._next, self._pieces(self._next)
        self._next += 1

        def begun() -> None:
            for observer in self.observers:
                observer.begun(number)

        def ended() -> None:
            for observer in self.observers:
                observer.ended(number)

        for observer in self.observers:
            observer.sent(number)
        self._waits.append(self.transport.send(pieces, begun, ended))


def tensor_spec(name: str, parameter: Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))


def flat_layouts(tensors: Sequence[tuple[str, nn.Parameter]]) -> dict[str, FlatLayout]:
    """Returns the layout of the flat gradient buffer of each dtype.

    There is always a layout for float32, because the signals use this buffer.
    """
    by_dtype: dict[str, list[TensorSpec]] = {"float32": []}
    for name, parameter in tensors:
        spec = tensor_spec(name, parameter)
        by_dtype.setdefault(spec.dtype, []).append(spec)
    return {dtype: FlatLayout.build(specs) for dtype, specs in by_dtype.items()}


def _dense(name: str, gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise RunError(
            f"the gradient of {name} is sparse", "make it dense, as with nn.Embedding(sparse=False)"
        )
    return gradient


def _dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """Returns the strides of a dense gradient in the parameter's memory format (channels_last or not)."""
    return torch.empty_like(parameter, memory_format=torch.preserve_format).stride()
