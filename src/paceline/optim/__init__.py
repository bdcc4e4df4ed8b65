"""Optimizers and learning-rate schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from paceline.optim.lars import LARS, SGD
    from paceline.optim.muon import Muon
    from paceline.optim.settings import OptimSettings

__all__ = ["LARS", "SGD", "Muon", "OptimSettings"]
__getattr__, __dir__ = lazy_exports(
    __name__, {"LARS": "lars", "SGD": "lars", "Muon": "muon", "OptimSettings": "settings"}
)
