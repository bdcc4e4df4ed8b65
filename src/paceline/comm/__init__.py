"""The communication module: process groups, agreement, algorithms, and the exchange of gradients.

torch.distributed (NCCL, Gloo) is the engine; nothing here opens a socket of its own. `HybridAllReduce`
and `SizeTable` also serve plain DDP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.comm.hybrid import HybridAllReduce
    from paceline.comm.size_table import SizeTable

__all__ = ["HybridAllReduce", "SizeTable"]


def __getattr__(name: str) -> Any:
    """Loaded at first use: settings of this room must start without torch."""
    if name == "HybridAllReduce":
        from paceline.comm.hybrid import HybridAllReduce

        return HybridAllReduce
    if name == "SizeTable":
        from paceline.comm.size_table import SizeTable

        return SizeTable
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
