from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from comm.exchanges import joined
from paceline.comm.gradient_order import agree_order, record_order
from ranks import run_ranks


class Crossed(nn.Module):
    """Declared against the order of use; `tied` is used first and last, `idle` not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.tied, self.idle = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.ice = nn.Linear(4, 4, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tied(self.last(self.ice(self.first(self.tied(x)))))
        return out


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def test_the_order_is_that_of_arrival() -> None:
    model = Crossed()
    order = record_order(trained(model), lambda: model(torch.ones(2, 4)).sum().backward())
    # The tied weight is whole only when backward has reached its first use.
    assert order == ("last.weight", "first.weight", "tied.weight", "idle.weight")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_is_left_behind_where_backward_fails() -> None:
    model = Crossed()

    def fails() -> None:
        model(torch.ones(2, 4)).sum().backward()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        record_order(trained(model), fails)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def _agreed(rank: int) -> tuple[str, ...]:
    with joined() as group:
        return agree_order(group, ("a", "ü") if rank == 0 else ("ü", "a"))


def test_rank_zero_decides() -> None:
    assert run_ranks(2, _agreed) == [("a", "ü")] * 2
