"""State of a parameter: its creation, and its restoration from a checkpoint.

State is fp32 with the parameter's own strides: the buffers of the rule, such as `momentum_buffer`, and,
for parameters in fp16 or bf16, `master`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import PacelineError

HALVES = (torch.float16, torch.bfloat16)
FORMATS = (torch.float32, *HALVES)
MASTER = "master"
MOMENTUM = "momentum_buffer"
EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"
STEP = "step"  # Adam's count of a parameter's updates: a number on the device
State = dict[str, Any]


def require_dense(parameter: Tensor) -> None:
    """Raises unless memory holds each element once, without gaps: the kernels iterate over memory."""
    expected = 1
    dims = [d for d in zip(parameter.stride(), parameter.shape, strict=True) if d[1] != 1]
    for stride, size in sorted(dims):
        if stride != expected and parameter.numel() > 0:
            raise PacelineError(
                f"parameter of shape {tuple(parameter.shape)} and strides {parameter.stride()} has "
                "gaps or overlaps in memory",
                "make it a parameter of its own: nn.Parameter(tensor.clone())",
            )
        expected *= size


def _state_format(parameter: Tensor) -> torch.dtype:
    """fp32, or the format of a parameter that is wider."""
    return torch.promote_types(parameter.dtype, torch.float32)


def create_state(parameter: Tensor, state: State, buffers: Sequence[str]) -> None:
    """Adds what `state` lacks: `buffers` of zeros, and the master as a copy of the parameter."""
    require_dense(parameter)
    kind = _state_format(parameter)
    for name in buffers:
        if state.get(name) is None:
            state[name] = torch.zeros_like(
                parameter, dtype=kind, memory_format=torch.preserve_format
            )
    if parameter.dtype in HALVES and state.get(MASTER) is None:
        state[MASTER] = parameter.detach().to(torch.float32, memory_format=torch.preserve_format)


def restore_state(
    groups: list[dict[str, Any]],
    saved: Mapping[str, Any],
    old: Mapping[Tensor, State],
    new: dict[Tensor, State],
    keys: Sequence[str],
) -> None:
    """Replaces the state in `new`, which torch has cast to the parameters' formats, by the saved fp32
    values of the masters and of `keys`.

    Existing memory of `old` is reused, because captured CUDA graphs hold its addresses. A saved
    master is dropped where the parameter is its own master.
    """
    ids = chain.from_iterable(group["params"] for group in saved["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in groups)
    for name, parameter in zip(ids, parameters, strict=True):
        source = saved["state"].get(name)
        if source is None:
            continue
        state, kept = new[parameter], old.get(parameter, {})
        own_master = parameter.dtype not in HALVES
        for key in (MASTER, *keys):
            value = source.get(key)
            if key == MASTER and value is None and not own_master and MASTER in kept:
                state[MASTER] = kept[MASTER]  # saved from an fp32 parameter
                continue
            if value is None or (key == MASTER and own_master):
                state.pop(key, None)
                continue
            target = kept.get(key)
            if target is None:
                same = torch.as_tensor(value).shape == parameter.shape
                like = parameter if same and key != STEP else parameter.new_empty(value.shape)
                target = torch.empty_like(
                    like, dtype=_state_format(parameter), memory_format=torch.preserve_format
                ).detach()
            target.copy_(torch.as_tensor(value))
            state[key] = target
