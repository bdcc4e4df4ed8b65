"""The communication module: process groups, agreement, algorithms, and the exchange of gradients.

torch.distributed (NCCL, Gloo) is the engine; nothing here opens a socket of its own. The public names,
which also serve plain DDP, load on first use: importing this room does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.comm.hybrid import HybridAllReduce
    from paceline.plan.size_table import SizeTable

__all__ = ["HybridAllReduce", "SizeTable"]

_HOME = {"HybridAllReduce": "paceline.comm.hybrid", "SizeTable": "paceline.plan.size_table"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
