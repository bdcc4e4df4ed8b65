"""Optimizers with fp32 master weights, learning-rate schedules, and the scaling of recipes to batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import lazy_exports

if TYPE_CHECKING:
    from paceline.optim.adam import LAMB as LAMB
    from paceline.optim.adam import AdamW as AdamW
    from paceline.optim.base import MasterOptimizer as MasterOptimizer
    from paceline.optim.batch_growth import BatchGrowth as BatchGrowth
    from paceline.optim.build import create_optimizer as create_optimizer
    from paceline.optim.lars import LARS as LARS
    from paceline.optim.lars import SGD as SGD
    from paceline.optim.muon import Muon as Muon
    from paceline.optim.orthogonal import SharedProducts as SharedProducts
    from paceline.optim.orthogonal import is_matrix as is_matrix
    from paceline.optim.orthogonal import orthogonalize as orthogonalize
    from paceline.optim.orthogonal import share_out as share_out
    from paceline.optim.registry import register_optimizer as register_optimizer
    from paceline.optim.registry import register_schedule as register_schedule
    from paceline.optim.rule import Rows as Rows
    from paceline.optim.rule import UpdateRule as UpdateRule
    from paceline.optim.schedules import LrSchedule as LrSchedule
    from paceline.optim.schedules import set_rate as set_rate
    from paceline.optim.settings import OptimSettings as OptimSettings
    from paceline.optim.wrapped import WrappedOptimizer as WrappedOptimizer

if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_exports(__name__)
