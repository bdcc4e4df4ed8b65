"""What every optimizer of ours promises of a step that must not happen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from optim.lars_reference import bits_equal, everything
from paceline.optim import LARS


def check_bad_gradient(
    ps: Sequence[nn.Parameter], optimizer: LARS, which: int, poison: float
) -> None:
    """Nothing changes, its owner is named, and the next good step is a step."""
    with torch.no_grad():
        ps[0].view(-1)[0] = -0.0  # a product with 0 would turn its sign
    before = everything(optimizer)
    gradient = ps[which].grad
    assert gradient is not None
    gradient.view(-1)[-1] = poison
    optimizer.step()
    assert optimizer.overflow == 1
    assert optimizer.nonfinite() == [which]
    assert bits_equal(everything(optimizer), before)
    gradient.view(-1)[-1] = 0.25
    optimizer.step()
    assert optimizer.overflow == 0
    assert optimizer.nonfinite() == []
    assert not bits_equal(everything(optimizer), before)
    assert all(torch.isfinite(tensor).all() for tensor in everything(optimizer))


def check_switch(optimizer: LARS, switch: str) -> None:
    """`hold` or `found_inf`: while it is set a step changes no bit."""
    before = everything(optimizer)
    setattr(optimizer, switch, torch.ones(()))
    optimizer.step()
    assert bits_equal(everything(optimizer), before)
    assert optimizer.overflow == 0
    setattr(optimizer, switch, torch.zeros(()))
    optimizer.step()
    assert not bits_equal(everything(optimizer), before)
