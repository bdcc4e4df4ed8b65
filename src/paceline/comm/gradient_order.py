"""The order in which backward makes gradients ready: recorded once, and rank 0's for all.

In: the trained parameters, and a function that runs one backward pass. Out: their names in order of
arrival; those that got no gradient stand last. The gradients of the trial are thrown away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from paceline.comm.group import Group


def record_order(
    trained: Mapping[str, nn.Parameter], backward: Callable[[], None]
) -> tuple[str, ...]:
    """A parameter that two layers share counts when its gradient is whole."""
    arrived: dict[str, None] = {}

    def note(name: str) -> Callable[[Tensor], None]:
        def arrives(parameter: Tensor) -> None:
            arrived.pop(name, None)  # the last arrival counts
            arrived[name] = None

        return arrives

    handles = [
        parameter.register_post_accumulate_grad_hook(note(name))  # type: ignore[no-untyped-call]
        for name, parameter in trained.items()
    ]
    try:
        backward()
    finally:
        for handle in handles:
            handle.remove()
        for parameter in trained.values():
            parameter.grad = None
    return (*arrived, *(name for name in reversed(list(trained)) if name not in arrived))


def agree_order(group: Group, order: Sequence[str]) -> tuple[str, ...]:
    """Rank 0's order, on every rank. All ranks must have the same parameters, as settled before."""
    told = json.dumps(list(order)).encode() if group.rank == 0 else None
    return tuple(json.loads(group.broadcast_bytes(told)))
