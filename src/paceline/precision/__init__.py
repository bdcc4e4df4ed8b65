"""Number formats of activations, weights and gradients, and loss scaling."""

from __future__ import annotations

from paceline.core import lazy_exports

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "LossScale": "policy",
        "Policy": "policy",
        "PrecisionSettings": "settings",
        "allow_tf32": "policy",
        "choose_policy": "policy",
        "matrix_weights": "policy",
    },
)
