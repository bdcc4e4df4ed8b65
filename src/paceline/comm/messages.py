"""Messages: which pieces of the flat buffers travel for each buffer of a plan.

In: a `FusionPlan` and the layouts, whose tensors lie in the plan's order. Out: for each buffer one
contiguous piece of each number format that it has. The signals' tail travels with the last buffer, in
fp32 whatever the wire: inside its piece where that is fp32 too, else as a piece behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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

    @property
    def wire_bytes(self) -> int:
        """What travels."""
        return (self.stop - self.start) * item_bytes(self.dtype, self.wire)


def item_bytes(dtype: str, wire: str) -> int:
    """Of one element on the wire. A format's name ends with its bits."""
    name = dtype if wire == "auto" else wire
    return int("".join(c for c in name if c.isdigit())) // 8


def plan_messages(
    plan: FusionPlan, layouts: Mapping[str, FlatLayout], tail: int
) -> list[list[Message]]:
    """One list for each buffer of the plan. `tail` elements lie behind the float32 tensors."""
    found: list[list[Message]] = []
    for buffer in plan.buckets:
        names = set(buffer.tensors)
        pieces = []
        for dtype, layout in layouts.items():
            slots = [slot for slot in layout if slot.name in names]
            if slots:
                # To where the next tensor would begin: padding travels, so that pieces stay aligned.
                end = -(-slots[-1].stop // layout.align) * layout.align
                start = slots[0].offset
                pieces.append(Message(dtype, start, end, buffer.algorithm, buffer.wire))
        bulk = max(pieces, key=lambda piece: piece.wire_bytes, default=None)
        found.append(
            [p if p is bulk else replace(p, algorithm=buffer.beside_algorithm) for p in pieces]
        )
    _add_tail(found[-1], layouts["float32"].length, tail, plan.buckets[-1].beside_algorithm)
    return found


def _add_tail(last: list[Message], length: int, tail: int, algorithm: str) -> None:
    for number, piece in enumerate(last):
        if (piece.dtype, piece.stop) == ("float32", length) and piece.wire in ("auto", "float32"):
            last[number] = replace(piece, stop=length + tail)
            return
    last.append(Message("float32", length, length + tail, algorithm, "float32"))
