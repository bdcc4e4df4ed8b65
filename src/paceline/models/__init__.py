"""Networks: creation by name, fused forms, parameter groups, pretrained weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import lazy_exports

if TYPE_CHECKING:
    from paceline.models.alexnet import AlexNet
    from paceline.models.pretrained import load_pretrained
    from paceline.models.registry import create_model, named_roles, parameter_groups
    from paceline.models.resnet import SmallResNet, fuse_norms
    from paceline.models.settings import (
        MODEL_NAMES,
        ModelSettings,
        check_model_name,
        check_trust,
        register_model,
        requires_trust,
    )

__all__ = [
    "MODEL_NAMES",
    "AlexNet",
    "ModelSettings",
    "SmallResNet",
    "check_model_name",
    "check_trust",
    "create_model",
    "fuse_norms",
    "load_pretrained",
    "named_roles",
    "parameter_groups",
    "register_model",
    "requires_trust",
]
if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "MODEL_NAMES": "settings",
            "AlexNet": "alexnet",
            "ModelSettings": "settings",
            "SmallResNet": "resnet",
            "check_model_name": "settings",
            "check_trust": "settings",
            "create_model": "registry",
            "fuse_norms": "resnet",
            "load_pretrained": "pretrained",
            "named_roles": "registry",
            "parameter_groups": "registry",
            "register_model": "settings",
            "requires_trust": "settings",
        },
    )
