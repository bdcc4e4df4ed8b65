"""Freezing: which parameters are not trained, by patterns of their names.

A batch norm whose parameters are all frozen runs in evaluation mode: it normalizes with its running
statistics and does not update them. Otherwise a frozen layer would still follow the new data.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.core.errors import ConfigError, nearest

_SHOWN = 8


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Turns gradients off for all parameters that match a pattern, sets the model to training mode and
    its frozen batch norms to evaluation mode. Parameters that are frozen already stay frozen.

    A pattern is a glob over parameter names (`layer1.*`, `*.bias`) or the name of a module. Raises
    ConfigError for a pattern that matches nothing, and if nothing is left to train.
    """
    # With all names of a shared parameter: each of them freezes it.
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        found = [parameter for name, parameter in named if _matches(name, pattern)]
        if not found:
            raise ConfigError(
                "model.freeze", pattern, "matches no parameter", _similar(pattern, model)
            )
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError(
            "model.freeze", list(patterns), "leaves no parameter to train", "freeze less"
        )
    model.train()
    for layer in frozen_norms(model):
        layer.eval()


def frozen_norms(model: nn.Module) -> list[nn.Module]:
    """Batch norms with parameters, none of which is trained."""
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, _BatchNorm)
        and list(layer.parameters(recurse=False))
        and not any(p.requires_grad for p in layer.parameters(recurse=False))
    ]


def count_frozen(model: nn.Module) -> int:
    """Values, not tensors."""
    return sum(p.numel() for p in model.parameters() if not p.requires_grad)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def _similar(pattern: str, model: nn.Module) -> str:
    """The nearest names of parameters and modules, or the model's children."""
    plain = pattern.rstrip("*").rstrip(".")
    names = {name for name, _ in model.named_parameters()}
    names |= {name for name, module in model.named_modules() if name and list(module.parameters())}
    hint = nearest(plain, names)
    if hint.startswith("did you mean"):
        return hint
    children = [name for name, child in model.named_children() if list(child.parameters())]
    more = ", …" if len(children) > _SHOWN else ""
    return f"its modules are {', '.join(children[:_SHOWN])}{more}" if children else hint
