"""The networks, how they are built and loaded, and which of their parameters decay.

The public names load on first use, so that importing this room does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.models.registry import create_model
    from paceline.models.roles import parameter_groups
    from paceline.models.settings import ModelSettings

__all__ = ["ModelSettings", "create_model", "parameter_groups"]

_HOME = {"create_model": "registry", "parameter_groups": "roles", "ModelSettings": "settings"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
