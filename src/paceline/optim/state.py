"""Creates, restores and checks the optimizer state of parameters.

The state of a parameter is fp32 and has the parameter's strides. It consists of buffers, such as
`momentum_buffer`, and, for a parameter in fp16 or bf16, of the fp32 master weights.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import CheckpointError, PacelineError

HALVES = (torch.float16, torch.bfloat16)
FORMATS = (torch.float32, *HALVES)
MASTER = "master"
MOMENTUM = "momentum_buffer"
EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"
STEP = "step"  # number of updates of a parameter in Adam, a scalar on the device
State = dict[str, Any]


def _require_dense(parameter: Tensor) -> None:
    """Raises PacelineError unless the elements fill one block of memory, as kernels require."""
    expected = 1
    dims = [d for d in zip(parameter.stride(), parameter.shape, strict=True) if d[1] != 1]
    for stride, size in sorted(dims):
        if stride != expected and parameter.numel() > 0:
            raise PacelineError(
                f"parameter of shape {tuple(parameter.shape)} and strides {parameter.stride()} has "
                "gaps or overlaps in memory",
                "make it contiguous: nn.Parameter(tensor.clone())",
            )
        expected *= size


def _state_format(parameter: Tensor) -> torch.dtype:
    """Returns the dtype of the state: fp32, or the parameter's dtype if that is wider."""
    return torch.promote_types(parameter.dtype, torch.float32)


def create_state(parameter: Tensor, state: State, buffers: Sequence[str]) -> None:
    """Adds missing entries to `state`: zeros for `buffers`, and master weights for half precision."""
    _require_dense(parameter)
    for name in buffers:
        if state.get(name) is None:
            state[name] = torch.zeros_like(
                parameter, dtype=_state_format(parameter), memory_format=torch.preserve_format
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
    """Replaces state that torch has cast to the parameters' dtypes by the saved fp32 values.

    Args:
        groups: Parameter groups of the optimizer.
        saved: The state dict that is being loaded.
        old: The state before loading. The function reuses the memory of these tensors, because captured
            CUDA graphs hold the addresses.
        new: The state after torch's `load_state_dict`, which the function corrects in place.
        keys: Names of the state entries to restore, in addition to masters.
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


# Checkpoints hold plain values and tensors, which `torch.load(weights_only=True)` reads.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def plain(value: Any, where: str) -> Any:
    """Converts NumPy numbers in a state to Python numbers, and checks that a checkpoint can hold it.

    Args:
        value: A state dict of an optimizer or a callback, or a part of it.
        where: The name of the state, for the message.

    Returns:
        The value without NumPy types.

    Raises:
        CheckpointError: If a value could not be read back without executing code.
    """
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return value.item()
    if isinstance(value, Tensor) or type(value) in _PLAIN:
        return value
    if type(value) in (dict, OrderedDict) and all(type(key) in _PLAIN for key in value):
        items = ((key, plain(item, f"{where}[{key!r}]")) for key, item in value.items())
        return type(value)(items)
    if type(value) in (list, tuple):
        return type(value)(plain(item, f"{where}[{n}]") for n, item in enumerate(value))
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold",
        "keep numbers, texts, tensors, lists and dicts in the state",
    )
