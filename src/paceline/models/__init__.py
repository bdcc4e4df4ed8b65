"""Networks: creation by name, accelerations, parameter groups, pretrained weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import lazy_exports

if TYPE_CHECKING:
    from paceline.models.acceleration import register_acceleration as register_acceleration
    from paceline.models.alexnet import AlexNet as AlexNet
    from paceline.models.pretrained import load_pretrained as load_pretrained
    from paceline.models.registry import create_model as create_model
    from paceline.models.registry import named_roles as named_roles
    from paceline.models.registry import parameter_groups as parameter_groups
    from paceline.models.resnet import SmallResNet as SmallResNet
    from paceline.models.settings import MODEL_NAMES as MODEL_NAMES
    from paceline.models.settings import ModelSettings as ModelSettings
    from paceline.models.settings import check_model_name as check_model_name
    from paceline.models.settings import register_model as register_model
    from paceline.models.tensor_file import TensorFileError as TensorFileError
    from paceline.models.tensor_file import load_tensors as load_tensors

if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_exports(__name__)
