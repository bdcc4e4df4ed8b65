"""`Rooted`: reduce to a root and broadcast from it, along any tree.

In: a segment on every member. Out: after `reduce`, the sum in the root's segment; after `broadcast`, the
root's segment everywhere. Between the two the root may do more with it.
"""

from __future__ import annotations

from torch import Tensor

from paceline.comm.algorithms.accumulate import add_arrivals
from paceline.comm.algorithms.lane import Lane
from paceline.comm.algorithms.segments import Rounds
from paceline.comm.algorithms.tree_shape import TreeShape


class Rooted:
    """One segment's way up a tree and down again."""

    def __init__(self, lane: Lane, segment: Tensor, shape: TreeShape) -> None:
        self._lane = lane
        self._segment = segment
        self._shape = shape
        length, count = segment.numel(), len(shape.children)
        inbox = lane.scratch("tree", length * count, segment)
        self._up = lane.expect(
            [
                (inbox[length * at : length * (at + 1)], child)
                for at, child in enumerate(shape.children)
            ]
        )
        # The result may come straight into the segment: it can only exist once this rank's own
        # share has arrived where it was sent.
        above = [] if shape.parent is None else [(segment, shape.parent)]
        self._down = lane.expect(above)

    def reduce(self) -> Rounds:
        for number in range(self._shape.levels + 1):
            if number == self._shape.height:
                add_arrivals(
                    self._segment, self._up.arrivals(), len(self._shape.children), self._lane
                )
                if self._shape.parent is not None:
                    self._lane.send(self._segment, self._shape.parent)
            yield

    def broadcast(self) -> Rounds:
        for number in range(self._shape.levels + 1):
            if number == self._shape.depth:
                self._down.take_all()
                # Deepest branches first: theirs is the longest way.
                for child in reversed(self._shape.children):
                    self._lane.send(self._segment, child)
            yield
