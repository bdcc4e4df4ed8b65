"""fp32 masters and momentum of the parameters, and how they outlive a checkpoint.

In: parameters in fp32, fp16 or bf16. Out: `state[p]` with `momentum_buffer` and, for half formats,
`master`, both in fp32 with the parameter's own strides. torch casts the state of an fp16 parameter to
fp16 as it loads (1.0001 becomes 1.0); `restore` puts the exact values back.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from paceline.optim.update_rows import HALVES, require_dense

MASTER = "master"
MOMENTUM = "momentum_buffer"
State = dict[str, Any]


def create(parameter: Tensor, state: State, in_half: bool) -> None:
    """Fills in what is missing: zero momentum, and the master as a copy of the parameter."""
    require_dense(parameter)
    kind = parameter.dtype if in_half else torch.float32
    if state.get(MOMENTUM) is None:
        state[MOMENTUM] = torch.zeros_like(
            parameter, dtype=kind, memory_format=torch.preserve_format
        )
    if parameter.dtype in HALVES and not in_half and state.get(MASTER) is None:
        state[MASTER] = parameter.detach().to(torch.float32, memory_format=torch.preserve_format)


def restore(
    groups: list[dict[str, Any]],
    saved: Mapping[str, Any],
    old: Mapping[Tensor, State],
    new: dict[Tensor, State],
    in_half: bool,
) -> None:
    """Replaces the cast state in `new` by the saved values, in the memory of `old` where there is any.

    Memory is kept because a captured CUDA graph knows the addresses. A master that was saved for a
    parameter which is its own master now is dropped.
    """
    ids = chain.from_iterable(group["params"] for group in saved["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in groups)
    for name, parameter in zip(ids, parameters, strict=True):
        source = saved["state"].get(name)
        if source is None:
            continue
        state, kept = new[parameter], old.get(parameter, {})
        own_master = in_half or parameter.dtype not in HALVES
        for key in (MASTER, MOMENTUM):
            value = source.get(key)
            if key == MASTER and value is None and not own_master and MASTER in kept:
                state[MASTER] = kept[MASTER]  # what was saved in fp32 has none to give
                continue
            if value is None or (key == MASTER and own_master):
                state.pop(key, None)
                continue
            target = kept.get(key)
            if target is None:
                kind = parameter.dtype if in_half else torch.float32
                target = torch.empty_like(
                    parameter, dtype=kind, memory_format=torch.preserve_format
                ).detach()
            target.copy_(value)
            state[key] = target
