"""`Transport`: sums the buckets of a gradient exchange over all ranks.

`create_transport` chooses the transport that a plan needs. For a single bucket it is `DirectTransport`,
which uses the backend's own all-reduce in the caller's thread. For all other plans it is a transport of
`planned_transport`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from paceline.comm.group import Group
from paceline.comm.memory import Memory
from paceline.comm.settings import CommSettings
from paceline.core.extensions import load_part
from paceline.plan.fusion_plan import FusionPlan

Wait = Callable[[], None]
Notify = Callable[[], None]


class Piece(NamedTuple):
    """One message: a range of a flat gradient buffer, with its algorithm and wire format.

    The wire format `auto` means the dtype of `tensor`.
    """

    tensor: Tensor
    algorithm: str
    wire: str


class Transport(ABC):
    """The base class of objects that sum gradient buckets over ranks.

    Every rank sends the same buckets in the same order.
    """

    # True if `send` returns before the sums are complete, so that backward continues.
    overlaps = False
    # True if a CUDA graph can capture `send` and the wait for its sums.
    capturable = False

    @property
    def memory(self) -> Memory | None:
        """Returns the state that the transport keeps between steps (see `Memory`), or None."""
        return None

    @abstractmethod
    def send(self, pieces: Sequence[Piece], begun: Notify, ended: Notify) -> Wait:
        """Starts to sum the messages of one bucket over ranks, in place.

        Args:
            pieces: The messages of the bucket.
            begun: Function that the transport calls when it sends the bucket.
            ended: Function that the transport calls when the sums of the bucket are complete.

        Returns:
            A function that waits until the sums are complete.
        """

    def abandon(self) -> None:  # noqa: B027
        """Gives up buckets whose sum is not complete, after their process groups have ended."""

    def close(self) -> None:  # noqa: B027
        """Frees threads and process groups. Does not wait for buckets whose sum is not complete."""


class DirectTransport(Transport):
    """Sums buckets with the backend's own all-reduce, in the caller's thread.

    Each tensor is sent in its own number format.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def send(self, pieces: Sequence[Piece], begun: Notify, ended: Notify) -> Wait:
        begun()
        for piece in pieces:
            self._group.all_reduce_sum(piece.tensor, wait=False)
        ended()
        return lambda: None


def create_transport(group: Group, settings: CommSettings, plan: FusionPlan) -> Transport:
    """Creates the transport that a plan needs. All ranks call this at the same point.

    Args:
        group: The group of all ranks.
        settings: The section `[comm]` of the recipe.
        plan: The fusion plan.
    """
    native = all(b.algorithm == b.beside_algorithm == "native" for b in plan.buckets)
    if native and len(plan.buckets) == 1 and plan.buckets[0].wire == "auto":
        return DirectTransport(group)
    create = load_part(
        "comm.planned_transport:create_planned", "comm.algorithm", settings.algorithm
    )
    with group.recorded():
        made: Transport = group.watched(
            "the creation of process groups", lambda: create(group, settings, plan, native=native)
        )
    return made
