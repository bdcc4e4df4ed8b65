"""Optimizers on fp32 master weights, and learning-rate schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import lazy_exports

if TYPE_CHECKING:
    from paceline.optim.adam import LAMB, AdamW
    from paceline.optim.base import MasterOptimizer
    from paceline.optim.build import LrSchedule, create_optimizer, set_rate
    from paceline.optim.lars import LARS, SGD
    from paceline.optim.muon import Muon
    from paceline.optim.orthogonal import SharedProducts, is_matrix, orthogonalize, share_out
    from paceline.optim.settings import OptimSettings
    from paceline.optim.soap import SOAP
    from paceline.optim.wrapped import WrappedOptimizer

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "SOAP",
    "AdamW",
    "LrSchedule",
    "MasterOptimizer",
    "Muon",
    "OptimSettings",
    "SharedProducts",
    "WrappedOptimizer",
    "create_optimizer",
    "is_matrix",
    "orthogonalize",
    "set_rate",
    "share_out",
]
__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "LAMB": "adam",
        "LARS": "lars",
        "SGD": "lars",
        "SOAP": "soap",
        "AdamW": "adam",
        "LrSchedule": "build",
        "MasterOptimizer": "base",
        "Muon": "muon",
        "OptimSettings": "settings",
        "SharedProducts": "orthogonal",
        "WrappedOptimizer": "wrapped",
        "create_optimizer": "build",
        "is_matrix": "orthogonal",
        "orthogonalize": "orthogonal",
        "set_rate": "build",
        "share_out": "orthogonal",
    },
)
