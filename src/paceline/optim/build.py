"""Creates the optimizer that `OptimSettings` names, and splits groups for layer-wise rates.

With `layer_decay` the last layer has the full learning rate. The rate of each other layer is `decay`
times the rate of the following layer, as in timm.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from paceline.core.errors import ConfigError
from paceline.core.extensions import load_part
from paceline.core.imports import import_object
from paceline.optim.base import MasterOptimizer
from paceline.optim.fused import triton_unavailable
from paceline.optim.registry import Context, check_rule, registered_rule
from paceline.optim.rule import UpdateRule
from paceline.optim.settings import OptimSettings
from paceline.optim.wrapped import wrap


def create_optimizer(
    settings: OptimSettings,
    groups: Sequence[dict[str, Any]],
    lr: float,
    factory: Callable[..., Any] | None = None,
    seed: int = 0,
    norms: int = 0,
) -> MasterOptimizer:
    """Creates the optimizer of a training run.

    Args:
        settings: Settings of the section `[optim]`.
        groups: Result of `paceline.models.parameter_groups`. Groups with the role `bias_norm` have no
            trust ratio.
        lr: Peak learning rate.
        factory: Function that creates an optimizer from the groups. If given, it replaces the optimizer
            that the settings name.
        seed: Seed of stochastic rounding.
        norms: Number of norm layers in the model.

    Returns:
        The optimizer. A torch optimizer is wrapped in a `WrappedOptimizer`.

    Raises:
        ConfigError: If the optimizer cannot be created or cannot be used.
    """
    if factory is not None:
        return wrap("optimizer", getattr(factory, "__name__", "given"), factory, groups)
    if settings.is_class:
        return _create_class(settings, groups, lr)
    fused = {"auto": None, "triton": True, "foreach": False}[settings.fused]
    devices = {p.device for group in groups for p in group["params"]}
    for device in devices if fused else ():
        if problem := triton_unavailable(device):
            raise ConfigError("optim.fused", settings.fused, problem, "use 'auto' or 'foreach'")
    if rule := registered_rule(settings.name):
        return _create_from_rule(settings, rule, groups, lr, fused)
    create = load_part(settings.own_optimizer.CREATE, "optim.name", settings.name)
    optimizer: MasterOptimizer = create(settings, groups, lr, Context(fused, seed, norms))
    return optimizer


def _create_from_rule(
    settings: OptimSettings,
    rule: type[UpdateRule],
    groups: Sequence[dict[str, Any]],
    lr: float,
    fused: bool | None = None,
) -> MasterOptimizer:
    """Creates an optimizer with a registered rule; `optim.arguments` has its hyper-parameters."""
    check_rule(rule)
    arguments = settings.arguments_table()
    fields = rule.Hyper._fields
    if unknown := sorted(set(arguments) - set(fields)):
        raise ConfigError(
            "optim.arguments", settings.arguments,
            f"{settings.name} has no argument {unknown[0]!r}", f"its arguments are {', '.join(fields)}",
        )  # fmt: skip

    def create(copies: list[dict[str, Any]]) -> MasterOptimizer:
        defaults = {"lr": lr, "weight_decay": settings.weight_decay, **arguments}
        own = {name: value for name, value in defaults.items() if name in fields}
        return MasterOptimizer(copies, own, rule, fused=fused)

    return wrap("optim.name", settings.name, create, groups)


def _create_class(
    settings: OptimSettings, groups: Sequence[dict[str, Any]], lr: float
) -> MasterOptimizer:
    """Creates the optimizer that `optim.name` names as `module:Class`."""
    imported = import_object("optim.name", settings.name)
    # A recipe file may name anything in torch.optim (config/trust.py), even what is not an optimizer.
    of_torch = settings.name.startswith("torch.optim:")
    is_optimizer = isinstance(imported, type) and issubclass(imported, Optimizer)
    if not callable(imported) or (of_torch and not is_optimizer):
        raise ConfigError(
            "optim.name", settings.name, "is not an optimizer", "name an optimizer's class"
        )
    if isinstance(imported, type) and issubclass(imported, UpdateRule):
        return _create_from_rule(settings, imported, groups, lr)
    arguments = settings.arguments_table()

    def create(copies: list[dict[str, Any]]) -> Any:
        return imported(copies, lr=lr, **arguments)

    return wrap("optim.name", settings.name, create, groups, imported)


# The first children of a ResNet, also in torchvision and timm, form one layer: the stem.
_STEM = re.compile(r"(conv1|bn1|norm1|norm0|features\.0|stem)(\.|$)")


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Returns the number of the layer, from 0, to which each parameter belongs, by parameter name.

    In a timm model, the model's `group_matcher` defines the layers. In any other model a layer is a child
    of the model, such as a stage of a ResNet, or a member of a list, such as `blocks.3` or `features.4`.
    Layers are numbered in the order of their first parameters.
    """
    names = [name for name, _ in model.named_parameters()]
    if callable(matcher := getattr(model, "group_matcher", None)):
        by_timm = _layers_of_timm(model, matcher)
        if by_timm.keys() >= set(names):
            return {name: by_timm[name] for name in names}
    layers: dict[str, int] = {}
    return {name: layers.setdefault(_layer(name), len(layers)) for name in names}


def _layers_of_timm(model: nn.Module, matcher: Any) -> dict[str, int]:
    """Returns the layer numbers that timm computes; empty if timm is not installed."""
    try:
        manipulate = importlib.import_module("timm.models")
    except ImportError:
        return {}
    by_layer = manipulate.group_parameters(model, matcher(coarse=False), reverse=True)
    order = {number: place for place, number in enumerate(sorted(set(by_layer.values())))}
    return {name: order[number] for name, number in by_layer.items()}


def _layer(name: str) -> str:
    # Parameters of the model itself, such as a class token, belong to the stem.
    if _STEM.match(name) or "." not in name:
        return "stem"
    # `layer1.0.conv1.weight` belongs to layer1; `blocks.3.attn.qkv.weight` to blocks.3.
    first, *rest = name.split(".")
    numbered = bool(rest) and rest[0].isdigit() and not first[-1].isdigit()
    return f"{first}.{rest[0]}" if numbered else first


def with_layer_decay(
    groups: Sequence[dict[str, Any]], model: nn.Module, decay: float
) -> list[dict[str, Any]]:
    """Splits each group by layer, from the first to the last, and sets `lr_scale`.

    Args:
        groups: Parameter groups of the model.
        model: Model whose layers are numbered.
        decay: Ratio of a layer's learning rate to the rate of the following layer; 1 keeps the groups.

    Returns:
        The new groups.

    Raises:
        ConfigError: If the model has a single layer.
    """
    if decay == 1:
        return list(groups)
    by_name = layer_numbers(model)
    numbers = {id(p): by_name[name] for name, p in model.named_parameters()}
    last = max(numbers.values())
    if last == 0:
        raise ConfigError(
            "optim.layer_decay", decay, "has no effect on a model with one layer", "leave it at 1"
        )
    split = []
    for group in groups:
        by_layer: dict[int, list[nn.Parameter]] = {}
        for p in group["params"]:
            by_layer.setdefault(numbers[id(p)], []).append(p)
        for number in sorted(by_layer):
            scale = float(decay ** (last - number))
            split.append(group | {"params": by_layer[number], "lr_scale": scale})
    return split


def describe_layers(groups: Sequence[dict[str, Any]]) -> str:
    """Describes the range of learning rates of the layers; "" if all layers have the same rate."""
    scales = {group.get("lr_scale", 1.0) for group in groups}
    if scales == {1.0}:
        return ""
    return (
        f"{len(scales)} layer rates from {min(scales):.3g} to {max(scales):.3g} of the schedule's"
    )
