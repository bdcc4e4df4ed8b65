"""Outputs of batch norm and ReLU that are recomputed in the backward pass instead of stored.

A convolution saves its input for the backward pass. If that input is relu(norm(x)), the norm saves x,
too, and one pass over x reproduces it bit for bit. The readers of the activation run in
`ActivationSource.not_stored`, so that autograd saves a reference to the source instead. The backward pass
computes the activation for its first reader and frees it after the last.

The output of a block, relu(norm(x) + shortcut), is not stored if the shortcut is. So every second of
consecutive blocks stores its output, and a recomputation never needs another one.

torch's operators and the fused kernels (`paceline.accel.fused`, `fused_blocks`) support this,
torch.compile does not.
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
    from paceline.accel.fused_blocks import DeferredOutput


class ActivationSource:
    """Recomputes an activation of the forward pass.

    Autograd's saved tensors refer to it. Autograd releases them one by one during the backward pass, and
    with the last of them the activation and its inputs.
    """

    def __init__(self) -> None:
        self._storage, self._shape = 0, torch.Size()
        self._compute: Callable[[], Tensor] | None = None
        self._made: Tensor | None = None

    def set(self, y: Tensor, compute: Callable[[], Tensor]) -> None:
        """Sets the activation `y` and the function that recomputes it bit for bit from stored tensors."""
        self._storage, self._shape, self._compute = _storage(y), y.shape, compute

    def get(self) -> Tensor:
        if self._made is None:
            assert self._compute is not None
            with torch.no_grad():
                self._made = self._compute()
        return self._made

    def not_stored(self) -> AbstractContextManager[None]:
        """Returns a context in which operators do not save the activation.

        The caller must keep a reference to it, so that no other tensor reuses its memory. Outer hooks do
        not see tensors that are saved in this context.
        """

        def pack(kept: Tensor) -> tuple[Tensor, int] | ActivationSource:
            whole = _storage(kept) == self._storage and kept.shape == self._shape
            return self if whole else (kept.detach(), kept._version)

        def unpack(kept: tuple[Tensor, int] | ActivationSource) -> Tensor:
            if isinstance(kept, ActivationSource):
                return kept.get()
            tensor, version = kept
            if tensor._version != version:  # torch's check does not include tensors saved by hooks
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} that backward needs has been changed in "
                    "place since forward"
                )
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True)
class RecomputedActivation:
    """An activation that is recomputed, for branch and shortcut of a block (see `norm_act_twice`)."""

    branch: Tensor
    shortcut: Tensor
    source: ActivationSource


# An activation; the same activation twice, for branch and shortcut (see `fused.norm_act_twice`); one that
# is not stored; or one that its reader computes.
BlockInput: TypeAlias = "Tensor | tuple[Tensor, Tensor] | RecomputedActivation | DeferredOutput"


def branch_and_shortcut(x: BlockInput) -> tuple[Tensor, Tensor]:
    """Returns the activation for the branch and for the shortcut of a block."""
    if isinstance(x, Tensor):
        return x, x
    if isinstance(x, RecomputedActivation):
        return x.branch, x.shortcut
    return x if isinstance(x, tuple) else x.output()


def computed(x: BlockInput) -> BlockInput:
    """Computes a deferred activation; returns any other `x` unchanged."""
    return x if isinstance(x, Tensor | RecomputedActivation) else branch_and_shortcut(x)


def not_stored(x: object) -> AbstractContextManager[None]:
    """Returns the context of an operator that reads `x`."""
    return x.source.not_stored() if isinstance(x, RecomputedActivation) else nullcontext()


def recomputed_norm(
    x: Tensor, norm: nn.BatchNorm2d, shortcut: Tensor | None = None
) -> RecomputedActivation:
    """Computes relu(norm(x) + shortcut) with torch's operators, for a stored shortcut."""
    out, again = normalized(x, norm)
    source = ActivationSource()
    if shortcut is not None:
        out = out + shortcut
        shortcut = shortcut.detach()

    def compute() -> Tensor:
        found = again()
        return F.relu(found if shortcut is None else found + shortcut, inplace=True)

    source.set(out, compute)
    with source.not_stored():
        y = F.relu(out, inplace=True)
    return RecomputedActivation(y, y, source)


def _storage(tensor: Tensor) -> Any:
    """Identifies the storage of a tensor on any device; tensors on the meta device have no address."""
    return tensor.untyped_storage()._cdata
