"""Helpers for tests of the exchange: groups of one and of many ranks, and one exchange of gradients."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.comm import SIGNALS, CommSettings, GradientExchange, Group, Signals
from paceline.core.topology import Topology

CPU = torch.device("cpu")


def alone() -> Group:
    return Group(Topology(), CommSettings(), CPU)


@contextmanager
def joined() -> Iterator[Group]:
    """The group of the ranks that `run_ranks` started."""
    group = Group(Topology.from_env(os.environ), CommSettings(), CPU)
    try:
        yield group
    finally:
        group.close()


def agreed(exchange: GradientExchange, loss: float = 0.0, **signals: float) -> Signals:
    """Reduces, and returns the sums of the signals."""
    exchange.reduce(torch.tensor(loss), Signals(**signals))
    return Signals(*exchange.tail[: len(SIGNALS)].tolist())


def grads(model: nn.Module) -> list[Tensor]:
    found = [p.grad for p in model.parameters()]
    assert all(grad is not None for grad in found)
    return [grad.clone() for grad in found if grad is not None]


def uses(exchange: GradientExchange) -> dict[str, float]:
    return dict(zip(exchange.names, exchange.uses.tolist(), strict=True))
