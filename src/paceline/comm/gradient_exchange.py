"""The exchange of gradients over flat buffers.

In: the model's parameters. Their `.grad` become views into one contiguous buffer per number format,
in backward order, so that nothing is copied in or out. Out: after `reduce`, the sum over all ranks in
place, and the sums of a few signals that rode along: stopping, failing and counting cost no message
of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.core.flat_layout import FlatLayout, TensorSpec
from paceline.plan.fusion_plan import FusionPlan


@dataclass
class Signals:
    """What each rank adds to the step's own collective. All are summed over ranks."""

    loss: float = 0.0
    corrupt: float = 0.0
    fault: float = 0.0
    abandon: float = 0.0
    interrupt: float = 0.0
    terminate: float = 0.0

    def to_list(self) -> list[float]:
        return [getattr(self, field.name) for field in fields(self)]


_SIGNALS = len(fields(Signals))


class GradientExchange:
    """Owns the gradients' memory. The optimizer must keep `.grad` (no `set_to_none`)."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        group: Group,
        plan: FusionPlan | None = None,
    ) -> None:
        self._group = group
        trained = {name: p for name, p in parameters if p.requires_grad}
        # Backward reaches the last layer first; for a chain this is the order of readiness.
        self.plan = plan or FusionPlan.single(tuple(reversed(trained)))
        self.plan.check(tuple(trained))
        self.layouts = _layouts([(name, trained[name]) for name in self.plan.tensors])
        self.buffers: dict[str, Tensor] = {}
        for dtype, layout in self.layouts.items():
            tail = _SIGNALS if dtype == "float32" else 0
            buffer = torch.zeros(
                layout.length + tail, dtype=getattr(torch, dtype), device=group.device
            )
            self.buffers[dtype] = buffer
            for slot in layout:
                parameter = trained[slot.name]
                parameter.grad = buffer.as_strided(
                    parameter.shape, _dense_strides(parameter), slot.offset
                )
        self._tail = self.buffers["float32"][-_SIGNALS:]

    @property
    def gradients(self) -> list[Tensor]:
        """The buffers without the signals."""
        return [self.buffers[d][: layout.length] for d, layout in self.layouts.items()]

    def zero(self) -> None:
        """Before the first micro-step; backward then adds up in place."""
        for buffer in self.buffers.values():
            buffer.zero_()

    def reduce(self, signals: Signals) -> Signals:
        """Sums gradients and signals over all ranks."""
        self._tail.copy_(torch.tensor(signals.to_list()))
        for buffer in self.buffers.values():
            self._group.all_reduce_sum(buffer)
        return Signals(*self._tail.tolist())


def _layouts(tensors: Sequence[tuple[str, nn.Parameter]]) -> dict[str, FlatLayout]:
    """One layout for each number format; float32 always, because the signals travel in it."""
    by_dtype: dict[str, list[TensorSpec]] = {"float32": []}
    for name, parameter in tensors:
        dtype = str(parameter.dtype).removeprefix("torch.")
        by_dtype.setdefault(dtype, []).append(TensorSpec(name, tuple(parameter.shape), dtype))
    return {dtype: FlatLayout.build(specs) for dtype, specs in by_dtype.items()}


def _dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's own strides, so that channels_last weights get channels_last gradients."""
    return torch.empty_like(parameter, memory_format=torch.preserve_format).stride()
