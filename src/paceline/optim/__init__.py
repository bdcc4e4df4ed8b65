"""Optimizers and schedules.

The public names load on first use, so that importing this room does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.optim.lars import LARS
    from paceline.optim.muon import Muon
    from paceline.optim.settings import OptimSettings
    from paceline.optim.sgd import SGD

__all__ = ["LARS", "SGD", "Muon", "OptimSettings"]

_HOME = {"LARS": "lars", "Muon": "muon", "SGD": "sgd", "OptimSettings": "settings"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
