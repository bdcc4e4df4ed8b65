"""SVRG, HALP and their relatives in low precision; docs/field/halp.md has the algorithms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import lazy_exports

if TYPE_CHECKING:
    from paceline.alternatives.svrg.optimizer import SVRG, quantize

__all__ = ["SVRG", "quantize"]
if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_exports(__name__, {"SVRG": "optimizer", "quantize": "optimizer"})
