"""Messages: which pieces of the flat buffers travel for each buffer of a plan.

In: a `FusionPlan` and the layouts, whose tensors lie in the plan's order. Out: for each buffer one
contiguous piece of each number format that it has. The signals' tail travels last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.flat_layout import FlatLayout
from paceline.plan.fusion_plan import FusionPlan


@dataclass(frozen=True)
class Message:
    """Elements `start` to `stop` of the flat buffer of `dtype`."""

    dtype: str
    start: int
    stop: int
    algorithm: str
    wire: str


def plan_messages(
    plan: FusionPlan, layouts: Mapping[str, FlatLayout], tail: int
) -> list[list[Message]]:
    """One list for each buffer of the plan. `tail` elements lie behind the float32 tensors."""
    found: list[list[Message]] = []
    for buffer in plan.buffers:
        names = set(buffer.tensors)
        pieces = []
        for dtype, layout in layouts.items():
            slots = [slot for slot in layout if slot.name in names]
            if slots:
                # To where the next tensor would begin: padding travels, so that pieces stay aligned.
                end = -(-slots[-1].stop // layout.align) * layout.align
                start = slots[0].offset
                pieces.append(Message(dtype, start, end, buffer.algorithm, buffer.wire))
        found.append(pieces)
    length = layouts["float32"].length
    with_tail = Message("float32", length, length + tail, "native", "float32")
    last = found[-1]
    for number, piece in enumerate(last):
        if piece.dtype == "float32" and piece.stop == length:
            last[number] = Message(
                "float32", piece.start, length + tail, piece.algorithm, piece.wire
            )
            return found
    last.append(with_tail)
    return found
