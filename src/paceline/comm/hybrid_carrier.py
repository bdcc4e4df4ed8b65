"""`HybridCarrier`: the communication thread carries each message by the plan's algorithm.

In: the pieces of a buffer, from whichever thread backward runs on. Out: their sums. Memory of a GPU is
read once backward's stream has filled it, and waited for by the stream that goes on; over Gloo it
travels through pinned memory. A gradient is a share of the global batch's mean already, so its sum needs
no room for the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.comm.carrier import Piece, Tell, Wait
from paceline.comm.group import Group
from paceline.comm.hybrid import PlannedAllReduce
from paceline.comm.process_groups import ProcessGroups
from paceline.core.errors import CommError


class HybridCarrier:
    """Has process groups and a thread of its own."""

    name = "hybrid"
    overlaps = True
    recordable = False

    def __init__(self, group: Group, groups: ProcessGroups) -> None:
        self._group = group
        self._planned = PlannedAllReduce(groups)
        self._on_the_way = 0

    def send(self, pieces: Sequence[Piece], begun: Tell, ended: Tell) -> Wait:
        def run() -> Tensor:
            begun()
            for piece in pieces:
                self._planned.carry(piece.tensor, piece.algorithm, piece.wire)
            ended()
            return pieces[0].tensor

        future = self._planned.queue(run, pieces[0].tensor.device)
        self._on_the_way += 1

        def wait() -> None:
            try:
                future.wait()
            except RuntimeError as error:
                # The future only has the text; whoever reads the error wants its kind, too.
                cause = self._planned.failure
                if isinstance(cause, CommError):
                    raise self._group.told(cause) from cause
                raise cause or error from error
            self._on_the_way -= 1

        return wait

    def close(self) -> None:
        """A thread that may be stuck in a message is left behind, being a daemon; one that has failed
        is not, and its connections are closed, so that the others find out."""
        if self._on_the_way == 0 or self._planned.failure is not None:
            self._planned.close()
