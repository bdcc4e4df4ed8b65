"""The exchange of gradients over flat buffers.

In: the model's parameters, with the gradients that a backward pass left in `.grad`. `gather` moves them
into one contiguous buffer for each number format, in backward order; several micro-steps add up in
fp32 and are rounded once. Out: after `reduce`, the sum over all ranks, `.grad` being views of it, and the
sums of a few signals that rode along: stopping, failing and counting cost no message of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.core.errors import RunError
from paceline.core.flat_layout import FlatLayout, TensorSpec
from paceline.plan.fusion_plan import FusionPlan


@dataclass(frozen=True)
class Signals:
    """What each rank adds to the step's own collective. All are summed over ranks."""

    loss: float = 0.0
    corrupt: float = 0.0
    fault: float = 0.0
    abandon: float = 0.0
    interrupt: float = 0.0
    terminate: float = 0.0


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
    ) -> None:
        """`accumulate`: a step may gather more than once."""
        self._group = group
        self._trained = {name: p for name, p in parameters if p.requires_grad}
        # Backward reaches the last layer first; for a chain this is the order of readiness.
        self.plan = plan or FusionPlan.single(tuple(reversed(self._trained)))
        self.plan.check(tuple(self._trained))
        self.names = self.plan.tensors
        self.layouts = _layouts([(name, self._trained[name]) for name in self.names])
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
                    parameter.shape, _dense_strides(parameter), slot.offset
                )
            if accumulate:
                self._sums[dtype] = torch.zeros(layout.length, device=group.device)
        self.tail = self.buffers["float32"][-tail:]
        self._own = torch.zeros(tail, device=group.device)
        self._sent: tuple[float, ...] = (0.0,) * tail
        self._used: set[str] = set()

    @property
    def gradients(self) -> list[Tensor]:
        """The buffers without the signals."""
        return [self.buffers[d][: layout.length] for d, layout in self.layouts.items()]

    @property
    def uses(self) -> Tensor:
        """After `reduce`: how many ranks had a gradient for each tensor, in the plan's order."""
        return self.tail[len(SIGNALS) :]

    def begin(self) -> None:
        """Before the first micro-step."""
        self._used.clear()
        self.release()
        for total in self._sums.values():
            total.zero_()

    def release(self) -> None:
        """Takes `.grad` away, so that backward hands its own tensors over without adding."""
        for parameter in self._trained.values():
            parameter.grad = None

    def gather(self) -> None:
        """Moves the gradients of one backward pass into the buffers, in one kernel or two."""
        for dtype, layout in self.layouts.items():
            found = [slot.name for slot in layout if self._trained[slot.name].grad is not None]
            if not found:
                continue
            buffer = self.buffers[dtype][: layout.length]
            if self._sums and len(found) < len(layout):
                buffer.zero_()  # what this pass did not reach must not be added once more
            grads = [_dense(name, self._trained[name].grad) for name in found]
            torch._foreach_copy_([self._views[name] for name in found], grads)
            if self._sums:
                self._sums[dtype].add_(buffer)
            self._used.update(found)
        self.release()

    def note_uses(self, names: Iterable[str]) -> None:
        """Tells which tensors a replayed graph has gathered, since no Python ran."""
        self._used.update(names)

    @property
    def gathered(self) -> frozenset[str]:
        return frozenset(self._used)

    def reduce(self, loss: Tensor, signals: Signals) -> None:
        """Sums gradients and signals over all ranks; nothing waits for the device."""
        for dtype, total in self._sums.items():
            self.buffers[dtype][: total.numel()].copy_(total)
        for name in self.names:
            if name not in self._used:
                self._views[name].zero_()
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
        for buffer in self.buffers.values():
            self._group.all_reduce_sum(buffer)
        for name, view in self._views.items():
            self._trained[name].grad = view


def _layouts(tensors: Sequence[tuple[str, nn.Parameter]]) -> dict[str, FlatLayout]:
    """One layout for each number format; float32 always, because the signals travel in it."""
    by_dtype: dict[str, list[TensorSpec]] = {"float32": []}
    for name, parameter in tensors:
        dtype = str(parameter.dtype).removeprefix("torch.")
        by_dtype.setdefault(dtype, []).append(TensorSpec(name, tuple(parameter.shape), dtype))
    return {dtype: FlatLayout.build(specs) for dtype, specs in by_dtype.items()}


def _dense(name: str, gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise RunError(
            f"the gradient of {name} is sparse", "make it dense, as with nn.Embedding(sparse=False)"
        )
    return gradient


def _dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's own strides, so that channels_last weights get channels_last gradients."""
    return torch.empty_like(parameter, memory_format=torch.preserve_format).stride()
