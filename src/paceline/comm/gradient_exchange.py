"""The exchange of gradients over flat buffers.

In: the model's parameters, with the gradients that a backward pass left in `.grad`. `gather` moves them
into one contiguous buffer for each number format, in backward order; several micro-steps add up in
fp32 and are rounded once. Out: after `reduce`, the sum over all ranks, `.grad` being views of it, and the
sums of a few signals that rode along: stopping, failing and counting cost no message of their own.

With a carrier that overlaps, and once `arm`ed for the last micro-step, each buffer of the plan is sent as
soon as backward has filled it, strictly in the plan's order; `reduce` sends the rest and waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from paceline.comm.carrier import Carrier, DirectCarrier, Piece, Wait
from paceline.comm.exchange_observer import ExchangeObserver, NoObserver
from paceline.comm.exposed_time import ExposedTime, Reading
from paceline.comm.flat_gradients import dense, dense_strides, flat_layouts
from paceline.comm.group import Group
from paceline.comm.messages import plan_messages
from paceline.core.errors import RunError
from paceline.plan.fusion_plan import FusionPlan


@dataclass(frozen=True)
class Signals:
    """What each rank adds to the step's own collective. All are summed over ranks."""

    loss: float = 0.0
    corrupt: float = 0.0
    fault: float = 0.0
    abandon: float = 0.0
    # A rank was asked to save and go on.
    save: float = 0.0
    # A rank was asked to stop, by SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2.
    interrupt: float = 0.0
    terminate: float = 0.0
    hangup: float = 0.0
    user1: float = 0.0
    user2: float = 0.0


SIGNALS = tuple(field.name for field in fields(Signals))


class GradientExchange:
    """Owns the gradients' memory between backward pass and update."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        group: Group,
        plan: FusionPlan | None = None,
        *,
        accumulate: bool = False,
        carrier: Carrier | None = None,
        overlap: bool = True,
    ) -> None:
        """`accumulate`: a step may gather more than once. `overlap`: where the carrier can."""
        self.group = group
        self.carrier: Carrier = carrier or DirectCarrier(group)
        # Whoever looks on may be put here between steps.
        self.observer: ExchangeObserver = NoObserver()
        self._exposed = ExposedTime(group.device)
        self._trained = {name: p for name, p in parameters if p.requires_grad}
        # Backward reaches the last layer first; for a chain this is the order of readiness.
        self.plan = plan or FusionPlan.single(tuple(reversed(self._trained)))
        self.plan.check(tuple(self._trained))
        self.names = self.plan.tensors
        self.layouts = flat_layouts([(name, self._trained[name]) for name in self.names])
        self.buffers: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        tail = len(SIGNALS) + len(self.names)
        for dtype, layout in self.layouts.items():
            length = layout.length + (tail if dtype == "float32" else 0)
            kind = getattr(torch, dtype)
            self.buffers[dtype] = torch.zeros(length, dtype=kind, device=group.device)
            for slot in layout:
                parameter = self._trained[slot.name]
                self._views[slot.name] = self.buffers[dtype].as_strided(
                    parameter.shape, dense_strides(parameter), slot.offset
                )
            if accumulate:
                self._sums[dtype] = torch.zeros(layout.length, device=group.device)
        self.tail = self.buffers["float32"][-tail:]
        self._own = torch.zeros(tail, device=group.device)
        self._sent: tuple[float, ...] = (0.0,) * tail
        self._used: set[str] = set()
        self.messages = plan_messages(self.plan, self.layouts, tail)
        self._waits: list[Wait] = []
        self._next = 0
        self._armed = False
        self._place = {
            name: number
            for number, buffer in enumerate(self.plan.buffers)
            for name in buffer.tensors
        }
        self._missing: list[set[str]] = []
        # The last buffer waits for the signals, so a single one has nothing to gain.
        self.overlaps = overlap and self.carrier.overlaps and len(self.messages) > 1
        if self.overlaps:
            for name, parameter in self._trained.items():
                parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]

    @property
    def gradients(self) -> list[Tensor]:
        """The buffers without the signals."""
        return [self.buffers[d][: layout.length] for d, layout in self.layouts.items()]

    @property
    def uses(self) -> Tensor:
        """After `reduce`: how many ranks had a gradient for each tensor, in the plan's order."""
        return self.tail[len(SIGNALS) :]

    @property
    def exposed(self) -> Reading:
        """Tells how long the latest step waited; on a GPU, once the device is past it."""
        return self._exposed.reading

    @property
    def exposed_s(self) -> float:
        """The latest such time that is known."""
        return self._exposed.last_s

    def begin(self, step: int = 0) -> None:
        """Before the first micro-step of optimizer step `step`."""
        self._used.clear()
        self._next = 0
        self._waits.clear()
        self.release(self._trained)
        for total in self._sums.values():
            total.zero_()
        self.observer.step_begun(step)

    def arm(self) -> None:
        """Before the last backward pass of a step: from now on full buffers may leave."""
        if self.overlaps:
            self._armed = True
            self._missing = [set(buffer.tensors) for buffer in self.plan.buffers]

    def release(self, names: Iterable[str]) -> None:
        """Takes `.grad` away, so that backward hands its own tensors over without adding."""
        for name in names:
            self._trained[name].grad = None

    def gather(self) -> None:
        """Moves the gradients that have not left yet into the buffers, in one kernel or two."""
        self._armed = False
        for buffer in self.plan.buffers[: self._next]:
            for name in buffer.tensors:
                if self._trained[name].grad is not None:
                    raise RunError(
                        f"backward gave {name} a second gradient after its buffer had left",
                        "use --set comm.overlap=off",
                    )
        left = {name for buffer in self.plan.buffers[self._next :] for name in buffer.tensors}
        self._gather(left)

    def _gather(self, names: set[str]) -> None:
        for dtype, layout in self.layouts.items():
            slots = [slot for slot in layout if slot.name in names]
            found = [s.name for s in slots if self._trained[s.name].grad is not None]
            if not found:
                continue
            first, last = slots[0].offset, slots[-1].stop
            piece = self.buffers[dtype][first:last]
            if self._sums and len(found) < len(slots):
                piece.zero_()  # what this pass did not reach must not be added once more
            grads = [dense(name, self._trained[name].grad) for name in found]
            torch._foreach_copy_([self._views[name] for name in found], grads)
            if self._sums:
                self._sums[dtype][first:last].add_(piece)
            self._used.update(found)
        self.release(names)

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            if not self._armed:
                return
            self._missing[self._place[name]].discard(name)
            while self._next < len(self.messages) - 1 and not self._missing[self._next]:
                self._gather(set(self.plan.buffers[self._next].tensors))
                self._send()

        return arrived

    def _send(self) -> None:
        """The next buffer of the plan, complete as it is on this rank."""
        for name in self.plan.buffers[self._next].tensors:
            if name not in self._used:
                self._views[name].zero_()
        number, pieces = self._next, []
        for message in self.messages[number]:
            piece = self.buffers[message.dtype][message.start : message.stop]
            total = self._sums.get(message.dtype)
            if total is not None:
                stop = min(message.stop, total.numel())
                piece[: stop - message.start].copy_(total[message.start : stop])
            pieces.append(Piece(piece, message.algorithm, message.wire))
        self._next += 1
        self.observer.sent(number)
        self._waits.append(
            self.carrier.send(
                pieces,
                lambda: self.observer.begun(number),
                lambda: self.observer.ended(number),
            )
        )

    def join(self) -> None:
        """Waits for all that has left, as a recording must before it ends."""
        while self._waits:
            self._waits.pop(0)()

    def forget_sent(self, sent: int) -> None:
        """A recording that failed has sent nothing: the buffers from `sent` on have not left."""
        self._armed = False
        self._next = sent
        self._waits.clear()

    def note_replay(self, names: Iterable[str], sent: int) -> None:
        """Tells which tensors a replayed graph has gathered and how many buffers it has sent, since
        no Python ran."""
        self._used.update(names)
        self._next = sent

    @property
    def sent(self) -> int:
        """Buffers of this step that have left."""
        return self._next

    @property
    def gathered(self) -> frozenset[str]:
        return frozenset(self._used)

    def reduce(self, loss: Tensor, signals: Signals) -> None:
        """Sums gradients and signals over all ranks; nothing waits for the device."""
        self._armed = False
        own = (
            *(getattr(signals, name) for name in SIGNALS),
            *(float(name in self._used) for name in self.names),
        )
        if own != self._sent:
            # Pinned, so that the copy does not wait; mostly the same as in the step before.
            host = torch.tensor(own, pin_memory=self._own.is_cuda)
            self._own.copy_(host, non_blocking=True)
            self._sent = own
        self.tail.copy_(self._own)
        self.tail[0].copy_(loss)
        self._exposed.begin()
        while self._next < len(self.messages):
            self._send()
        self.join()
        self._exposed.end()
        for name, view in self._views.items():
            self._trained[name].grad = view
        self.observer.step_ended(self._exposed.last_s)
