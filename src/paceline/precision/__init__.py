"""Chooses the number formats of activations, weights and gradients, and scales the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import lazy_exports

if TYPE_CHECKING:
    from paceline.precision.policy import (
        LossScale,
        Policy,
        allow_tf32,
        choose_policy,
        matrix_weights,
    )
    from paceline.precision.settings import PrecisionSettings

__all__ = [
    "LossScale",
    "Policy",
    "PrecisionSettings",
    "allow_tf32",
    "choose_policy",
    "matrix_weights",
]
if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_exports(__name__)
