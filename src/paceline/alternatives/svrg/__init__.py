"""SVRG and HALP, also in 8 or 16 bits (docs/alternatives.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import lazy_exports

if TYPE_CHECKING:
    from paceline.alternatives.svrg.optimizer import SVRG, quantize

__all__ = ["SVRG", "quantize"]
if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_exports(__name__, {"SVRG": "optimizer", "quantize": "optimizer"})
