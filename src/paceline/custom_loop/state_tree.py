"""Converts state dicts to plain values and tensors, which `torch.load(weights_only=True)` reads.

The result is called a tree. In a tree, dictionaries with a special key represent NumPy values, and
tensors that only rank 0's file contains.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import CheckpointError
from paceline.train.checkpoint import content_hash

_MARK = "__paceline__"
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def encoded(value: Any, where: str) -> Any:
    """Converts a state to plain values and tensors (a tree).

    Args:
        value: State to convert.
        where: Path of `value` within the whole state, for error messages.

    Raises:
        CheckpointError: If a value cannot be read back without executing code.
    """
    if isinstance(value, Tensor):
        tensor = value.detach()
        # torch.save writes the whole storage of a view.
        whole = tensor.layout != torch.strided or tensor.untyped_storage().nbytes() == tensor.nbytes
        return tensor if whole else tensor.clone()
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind in "biufc":
            kind = "array" if isinstance(value, np.ndarray) else "scalar"
            return {_MARK: kind, "value": torch.from_numpy(array.copy())}
    elif type(value) in (dict, OrderedDict, Counter):
        items = {_key(k, where): encoded(v, f"{where}.{k}") for k, v in value.items()}
        return _like(value, items)
    elif type(value) in (list, tuple):
        return type(value)(encoded(item, f"{where}[{n}]") for n, item in enumerate(value))
    elif type(value) in _PLAIN:
        return value
    raise CheckpointError(
        f"{where.removeprefix('.objects').strip('.')} in the saved state is a {type(value).__name__}, "
        "which cannot be read back without executing code",
        "save numbers, texts, tensors, arrays, lists and dicts",
    )


def _like(table: Any, items: dict[Any, Any]) -> Any:
    """Returns `items` in a dictionary with the type and state-dict metadata of `table`."""
    made = type(table)(items)
    if isinstance(made, OrderedDict) and hasattr(table, "_metadata"):
        vars(made)["_metadata"] = table._metadata
    return made


def _key(key: Any, where: str) -> Any:
    if type(key) not in _PLAIN:
        raise CheckpointError(
            f"{where.strip('.')} in the saved state has a key of type {type(key).__name__}",
            "use texts or numbers as keys",
        )
    return key


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns a copy of `tree` in which `change(tensor)` replaces each tensor, in order."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return _like(tree, {key: map_tensors(value, change) for key, value in tree.items()})
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(item, change) for item in tree)
    return tree


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns all tensors of a result of `encoded`, in order."""
    tensors: list[Tensor] = []
    map_tensors(tree, tensors.append)
    return tensors


def reference(tensor: Tensor, shared: Mapping[str, int]) -> Any:
    """Returns a reference to an equal tensor in rank 0's file, or `tensor` itself if there is none.

    `shared` maps the content hash of rank 0's tensors to their index.
    """
    number = shared.get(content_hash(tensor))
    return tensor if number is None else {_MARK: "shared", "value": number}


def decoded(tree: Any, shared: list[Tensor]) -> Any:
    """Converts the result of `encoded` back to a state. `shared` has the tensors of rank 0's file."""
    if isinstance(tree, dict):
        kind = tree.get(_MARK)
        if kind == "shared":
            # References to one tensor of rank 0 must not share memory, hence the copy.
            return shared[tree["value"]].clone()
        if kind in ("array", "scalar"):
            array = decoded(tree["value"], shared).numpy()
            return array if kind == "array" else array[()]
        return _like(tree, {key: decoded(value, shared) for key, value in tree.items()})
    if type(tree) in (list, tuple):
        return type(tree)(decoded(item, shared) for item in tree)
    return tree
