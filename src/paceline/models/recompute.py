"""Outputs of batch norm and ReLU that backward computes again, so that they are not stored.

A convolution keeps its input for backward. Where that is relu(norm(x)), the norm keeps x as well, and one
pass over x gives its output again, to the bit. `MapSource` is how: the readers of the map run inside
`not_stored`, and autograd then keeps a reference to the source in place of the map. Backward computes the
map for the first reader that needs it and frees it after the last.

A block's output, relu(norm(x) + shortcut), is not stored where the shortcut is a stored map. So every
second of consecutive blocks stores its output, and computing one again never needs another one again.

Torch's operators and the fused kernels (`paceline.models.fused`, `fused_blocks`) can both do this,
torch.compile cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.models.synced_norm import normalized


class MapSource:
    """Computes a map of the forward pass again.

    Saved tensors of autograd refer to it. Autograd drops these one by one during backward, as soon as
    their gradients are computed, and with the last of them go the map and what it is computed from.
    """

    def __init__(self) -> None:
        self._place, self._shape = 0, torch.Size()
        self._compute: Callable[[], Tensor] | None = None
        self._made: Tensor | None = None

    def set(self, y: Tensor, compute: Callable[[], Tensor]) -> None:
        """`compute` gives the bits of `y`. It holds no map that would not be stored anyway."""
        self._place, self._shape, self._compute = _storage(y), y.shape, compute

    def get(self) -> Tensor:
        if self._made is None:
            assert self._compute is not None
            with torch.no_grad():
                self._made = self._compute()
        return self._made

    def not_stored(self) -> AbstractContextManager[None]:
        """Operators inside do not keep the map. The caller has it, so that no other tensor takes its
        place. Hooks of a caller do not see what is kept inside."""

        def pack(kept: Tensor) -> tuple[Tensor, int] | MapSource:
            whole = _storage(kept) == self._place and kept.shape == self._shape
            return self if whole else (kept.detach(), kept._version)

        def unpack(kept: tuple[Tensor, int] | MapSource) -> Tensor:
            if isinstance(kept, MapSource):
                return kept.get()
            tensor, version = kept
            if tensor._version != version:  # torch's own check does not see what hooks keep
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} that backward needs has been changed in "
                    "place since forward"
                )
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True)
class RecomputedMap:
    """A map as its readers take it in forward: for the branch and for the shortcut of a block (see
    `fused.norm_act_twice`)."""

    branch: Tensor
    shortcut: Tensor
    source: MapSource


def not_stored(x: object) -> AbstractContextManager[None]:
    """Around an operator that reads `x`."""
    return x.source.not_stored() if isinstance(x, RecomputedMap) else nullcontext()


def switch_forms(model: nn.Module, name: str, value: object) -> int:
    """Sets the attribute `name` of every module that has it; returns their number."""
    parts = _with_flag(model, name)
    for module in parts:
        setattr(module, name, value)
    return len(parts)


def _with_flag(model: nn.Module, name: str) -> list[nn.Module]:
    # A user's module may have an attribute of this name with another meaning.
    own = [m for m in model.modules() if type(m).__module__.startswith("paceline.models.")]
    return [module for module in own if hasattr(module, name)]


def recompute_norms(model: nn.Module, recompute: bool = True) -> int:
    """Switches every module of `model` that can do without stored norms; returns their number."""
    return switch_forms(model, "recompute", recompute)


def stores_norms(model: object) -> bool:
    """Whether it is a model that would need less memory with `recompute_norms`, which compiled ones
    cannot have."""
    if not isinstance(model, nn.Module) or any(_is_compiled(m) for m in model.modules()):
        return False
    return any(not module.recompute for module in _with_flag(model, "recompute"))


def _is_compiled(module: nn.Module) -> bool:
    """By `torch.compile(module)`, or by `module.compile()`."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def recomputed_norm(
    x: Tensor, norm: nn.BatchNorm2d, activation: nn.Module, shortcut: Tensor | None = None
) -> RecomputedMap:
    """activation(norm(x) + shortcut) with torch's operators; the activation works in place. The shortcut
    is a stored map."""
    out, again = normalized(x, norm)
    source = MapSource()
    if shortcut is not None:
        out = out + shortcut
        shortcut = shortcut.detach()

    def compute() -> Tensor:
        found = again()
        y: Tensor = activation(found if shortcut is None else found + shortcut)
        return y

    source.set(out, compute)
    with source.not_stored():
        y: Tensor = activation(out)
    return RecomputedMap(y, y, source)


def _storage(tensor: Tensor) -> Any:
    """Of one tensor at a time, on every device; tensors of the meta device have no address."""
    return tensor.untyped_storage()._cdata
