"""Outputs of batch norm and ReLU that backward computes again, so that they are not stored.

A convolution keeps its input for backward. Where that is relu(norm(x)), the norm keeps x as well, and one
pass over x gives its output again, to the bit. `MapSource` is how: the readers of the map run inside
`not_stored`, and autograd then keeps a reference to the source in place of the map. Backward computes the
map for the first reader that needs it and frees it after the last.

A block's output, relu(norm(x) + shortcut), is not stored where the shortcut is a stored map. So every
second of consecutive blocks stores its output, and computing one again never needs another one again.

Torch's operators and the fused kernels (`paceline.accel.fused`, `fused_blocks`) can both do this,
torch.compile cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.synced_norm import normalized

if TYPE_CHECKING:
    from paceline.accel.fused_blocks import Pending


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


# A feature map, or the same map twice: for the branch and for the shortcut (see `fused.norm_act_twice`),
# or one that is not stored, or one that its user computes.
Uses: TypeAlias = "Tensor | tuple[Tensor, Tensor] | RecomputedMap | Pending"


def split_uses(x: Uses) -> tuple[Tensor, Tensor]:
    """Returns the map for the branch and for the shortcut of a block."""
    if isinstance(x, Tensor):
        return x, x
    if isinstance(x, RecomputedMap):
        return x.branch, x.shortcut
    return x if isinstance(x, tuple) else x.output()


def computed(x: Uses) -> Uses:
    """Returns a map that was left to its user, or `x` itself."""
    return x if isinstance(x, Tensor | RecomputedMap) else split_uses(x)


def not_stored(x: object) -> AbstractContextManager[None]:
    """Around an operator that reads `x`."""
    return x.source.not_stored() if isinstance(x, RecomputedMap) else nullcontext()


def recomputed_norm(
    x: Tensor, norm: nn.BatchNorm2d, shortcut: Tensor | None = None
) -> RecomputedMap:
    """relu(norm(x) + shortcut) with torch's operators. The shortcut is a stored map."""
    out, again = normalized(x, norm)
    source = MapSource()
    if shortcut is not None:
        out = out + shortcut
        shortcut = shortcut.detach()

    def compute() -> Tensor:
        found = again()
        return F.relu(found if shortcut is None else found + shortcut, inplace=True)

    source.set(out, compute)
    with source.not_stored():
        y = F.relu(out, inplace=True)
    return RecomputedMap(y, y, source)


def _storage(tensor: Tensor) -> Any:
    """Of one tensor at a time, on every device; tensors of the meta device have no address."""
    return tensor.untyped_storage()._cdata
