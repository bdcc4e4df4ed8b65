"""How much memory tensors take, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of tensors that exist, and the most at a time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.norms = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        out = self.computed(func, args, kwargs or {})
        name = func._overloadpacket.__name__
        self.norms += name in ("native_batch_norm", "_native_batch_norm_legit", "batch_norm")
        self.norms += name in ("_batch_norm_with_update", "_batch_norm_no_update")
        given = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for tensor in (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)):
            if _place(tensor) not in self._known | given:
                self._add(tensor.untyped_storage())
        return out

    def computed(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of an operator without counting its temporary tensors."""
        return func(*args, **kwargs)

    def _add(self, storage: torch.UntypedStorage) -> None:
        place, size = int(storage._cdata), storage.nbytes()
        self._known.add(place)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._remove, place, size)

    def _remove(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
