"""Optimizers on fp32 master weights, learning-rate schedules and the scaling rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import lazy_exports

if TYPE_CHECKING:
    from paceline.optim.adam import LAMB, AdamW
    from paceline.optim.base import MasterOptimizer
    from paceline.optim.batch_growth import BatchGrowth
    from paceline.optim.build import create_optimizer
    from paceline.optim.lars import LARS, SGD
    from paceline.optim.muon import Muon
    from paceline.optim.orthogonal import SharedProducts, is_matrix, orthogonalize, share_out
    from paceline.optim.registry import register_optimizer, register_schedule
    from paceline.optim.rule import Rows, UpdateRule
    from paceline.optim.schedules import LrSchedule, set_rate
    from paceline.optim.settings import OptimSettings
    from paceline.optim.wrapped import WrappedOptimizer

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "AdamW",
    "BatchGrowth",
    "LrSchedule",
    "MasterOptimizer",
    "Muon",
    "OptimSettings",
    "Rows",
    "SharedProducts",
    "UpdateRule",
    "WrappedOptimizer",
    "create_optimizer",
    "is_matrix",
    "orthogonalize",
    "register_optimizer",
    "register_schedule",
    "set_rate",
    "share_out",
]
if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_exports(__name__)
