"""SGD that starts as RMSprop (docs/alternatives.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.alternatives.rms_warmup.settings import sgd_share
from paceline.core import lazy_exports

if TYPE_CHECKING:
    from paceline.alternatives.rms_warmup.optimizer import RMSpropWarmup

__all__ = ["RMSpropWarmup", "sgd_share"]
if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_exports(__name__, {"RMSpropWarmup": "optimizer"})
