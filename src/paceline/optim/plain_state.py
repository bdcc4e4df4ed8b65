"""State of other people's optimizers as `torch.load(weights_only=True)` reads it: plain values and
tensors."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import CheckpointError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def plain(value: Any, where: str) -> Any:
    """The value, with Python's numbers in place of NumPy's. CheckpointError for anything that could not
    be read back without executing code."""
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
        "keep numbers, texts, tensors, lists and dicts in the optimizer's state",
    )


def copied(value: Any) -> Any:
    """A copy of a plain value that later steps do not change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return value


def same(one: Any, two: Any) -> bool:
    """Whether plain values are equal; tensors are compared as wholes."""
    if isinstance(one, Tensor) or isinstance(two, Tensor):
        if not (isinstance(one, Tensor) and isinstance(two, Tensor)):
            return False
        alike = (one.shape, one.dtype, one.device) == (two.shape, two.dtype, two.device)
        return alike and torch.equal(one, two)
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if type(one) in (list, tuple) and type(one) is type(two):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)
