"""The weights of a run in full precision.

In: the model, which computes in half precision, and the optimizer, which holds the fp32 masters. Out: one
state dict of fp32 weights, for checkpoints, export and comparison; and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.optim.lars import LARS


def master_weights(
    model: nn.Module, optimizer: LARS, weights: Sequence[Tensor] | None = None
) -> dict[str, Tensor]:
    """Each parameter's master, or what is in its place in `weights`, by name; a frozen parameter has none
    and is taken as it is."""
    chosen = optimizer.masters() if weights is None else weights
    masters = {id(p): m for p, m in zip(_parameters(optimizer), chosen, strict=True)}
    return {name: masters.get(id(p), p).detach() for name, p in model.named_parameters()}


def full_state(
    model: nn.Module, optimizer: LARS, weights: Sequence[Tensor] | None = None
) -> dict[str, Tensor]:
    """The model's state dict with masters, or `weights` in their order, in place of its parameters."""
    chosen = optimizer.masters() if weights is None else weights
    # A parameter shared by two modules has two keys and one master.
    masters = {id(p): m for p, m in zip(_parameters(optimizer), chosen, strict=True)}
    state = model.state_dict(keep_vars=True)
    return {name: _widened(masters.get(id(value), value).detach()) for name, value in state.items()}


def restore_masters(model: nn.Module, optimizer: LARS, state: Mapping[str, Tensor]) -> None:
    """Fills the masters from a state dict of `full_state`; the model has its weights already."""
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter, master in zip(_parameters(optimizer), optimizer.masters(), strict=True):
        master.detach().copy_(state[names[id(parameter)]])


def _parameters(optimizer: LARS) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _widened(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
