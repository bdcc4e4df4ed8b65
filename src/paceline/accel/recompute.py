"""Outputs of batch norm and ReLU that are recomputed in the backward pass instead of stored.

A convolution saves its input for the backward pass. If that input is relu(norm(x)), the norm has
saved x anyway, and one pass over x reproduces the input bit for bit. Operations that read such an
activation run in the context `ActivationSource.not_stored`, so that autograd saves a reference to
the source instead. The backward pass recomputes the activation when it is first needed and frees it
after the last use.

The output of a block, relu(norm(x) + shortcut), is recomputed only if the shortcut is stored. So of
consecutive blocks, every second one stores its output, and a recomputation never needs another
recomputation.

torch's operators and the fused kernels (`fused`, `fused_blocks`) support this; torch.compile does
not.
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
    """Recomputes an activation of the forward pass when the backward pass needs it.

    Autograd saves references to this object in place of the activation. When it releases the last
    reference during the backward pass, the recomputed activation and its inputs are freed.
    """

    def __init__(self) -> None:
        self._storage, self._shape = 0, torch.Size()
        self._compute: Callable[[], Tensor] | None = None
        self._made: Tensor | None = None

    def set(self, y: Tensor, compute: Callable[[], Tensor]) -> None:
        """Sets the activation `y`, and a function that recomputes it bit for bit."""
        self._storage, self._shape, self._compute = _storage(y), y.shape, compute

    def get(self) -> Tensor:
        if self._made is None:
            assert self._compute is not None
            with torch.no_grad():
                self._made = self._compute()
        return self._made

    def not_stored(self) -> AbstractContextManager[None]:
        """Returns a context in which autograd saves this source instead of the activation.

        While the context is used, the caller must keep a reference to the activation, so that no
        other tensor gets its memory. Outer saved-tensor hooks do not see tensors that are saved
        here.
        """

        def pack(kept: Tensor) -> tuple[Tensor, int] | ActivationSource:
            whole = _storage(kept) == self._storage and kept.shape == self._shape
            return self if whole else (kept.detach(), kept._version)

        def unpack(kept: tuple[Tensor, int] | ActivationSource) -> Tensor:
            if isinstance(kept, ActivationSource):
                return kept.get()
            tensor, version = kept
            if tensor._version != version:  # torch does not check this for tensors saved by hooks
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} that backward needs has been changed in "
                    "place since forward"
                )
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@dataclass(frozen=True)
class RecomputedActivation:
    """An activation that autograd does not store, as two tensors for the branch and the shortcut."""

    branch: Tensor
    shortcut: Tensor
    source: ActivationSource


# The input of a block: an activation; the same activation twice, for branch and shortcut (see
# `fused.norm_act_twice`); an activation that is recomputed; or one that the next block computes.
BlockInput: TypeAlias = "Tensor | tuple[Tensor, Tensor] | RecomputedActivation | DeferredOutput"


def branch_and_shortcut(x: BlockInput) -> tuple[Tensor, Tensor]:
    """Returns the inputs of a block's branch and shortcut, two tensors of equal values."""
    if isinstance(x, Tensor):
        return x, x
    if isinstance(x, RecomputedActivation):
        return x.branch, x.shortcut
    return x if isinstance(x, tuple) else x.output()


def computed(x: BlockInput) -> BlockInput:
    """Returns `x`, but as two computed tensors if it is a `DeferredOutput`."""
    return x if isinstance(x, Tensor | RecomputedActivation) else branch_and_shortcut(x)


def not_stored(x: object) -> AbstractContextManager[None]:
    """Returns a context in which an operator reads `x`, so that autograd does not store it.

    The context does nothing unless `x` is a `RecomputedActivation`.
    """
    return x.source.not_stored() if isinstance(x, RecomputedActivation) else nullcontext()


def recomputed_norm(
    x: Tensor, norm: nn.BatchNorm2d, shortcut: Tensor | None = None
) -> RecomputedActivation:
    """Computes relu(norm(x) + shortcut), which the backward pass recomputes instead of storing it.

    Uses torch's operators. The shortcut, if there is one, must stay in memory.
    """
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
    """Returns a number that identifies a tensor's storage, even on the meta device."""
    return tensor.untyped_storage()._cdata
