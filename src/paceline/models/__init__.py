"""Networks: creation by name, accelerations, parameter groups, pretrained weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import lazy_exports

if TYPE_CHECKING:
    from paceline.models.acceleration import register_acceleration
    from paceline.models.alexnet import AlexNet
    from paceline.models.pretrained import load_pretrained
    from paceline.models.registry import create_model, named_roles, parameter_groups
    from paceline.models.resnet import SmallResNet
    from paceline.models.settings import (
        MODEL_NAMES,
        ModelSettings,
        check_model_name,
        register_model,
    )
    from paceline.models.tensor_file import TensorFileError, load_tensors

__all__ = [
    "MODEL_NAMES",
    "AlexNet",
    "ModelSettings",
    "SmallResNet",
    "TensorFileError",
    "check_model_name",
    "create_model",
    "load_pretrained",
    "load_tensors",
    "named_roles",
    "parameter_groups",
    "register_acceleration",
    "register_model",
]
if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_exports(__name__)
