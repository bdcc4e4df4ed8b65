"""`Staging`: memory for what is in flight, kept between calls.

In: a name, a length, a number format. Out: the same memory each time, grown where a longer stretch is
asked for. Several algorithms may share one `Staging` as long as they run one after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Staging:
    """Stretches of memory by name; their content is whatever was left there."""

    def __init__(self) -> None:
        self._stretches: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(
        self,
        name: str,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        pinned: bool = False,
    ) -> Tensor:
        """`pinned`: memory of the host that a GPU copies to and from without a detour."""
        key = (name, dtype, device)
        stretch = self._stretches.get(key)
        if stretch is None or stretch.numel() < length:
            stretch = torch.empty(length, dtype=dtype, device=device, pin_memory=pinned)
            self._stretches[key] = stretch
        return stretch[:length]

    @property
    def held_bytes(self) -> int:
        return sum(stretch.nbytes for stretch in self._stretches.values())
