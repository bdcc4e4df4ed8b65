"""Networks: how they are built, loaded and exported, and which of their parameters decay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from paceline.models.registry import create_model, parameter_groups
    from paceline.models.settings import ModelSettings

__all__ = ["ModelSettings", "create_model", "parameter_groups"]
__getattr__, __dir__ = lazy_exports(
    __name__,
    {"create_model": "registry", "parameter_groups": "registry", "ModelSettings": "settings"},
)
