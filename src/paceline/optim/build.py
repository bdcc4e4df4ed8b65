"""Creates the optimizer of `OptimSettings` for the groups of `paceline.models.parameter_groups`, and
divides these groups by depth for layer-wise decay of the learning rate.

With `layer_decay` the last layer has the full rate, each layer before it `decay` times that of the next,
as in timm.
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
    """The optimizer that the settings name, or the one that `factory` makes of groups. Groups of role
    `bias_norm` are not adapted unless the settings say so. `seed` is that of stochastic rounding,
    `norms` the number of norm layers that the model has."""
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
        return _of_rule(settings, rule, groups, lr, fused)
    create = load_part(settings.own_optimizer.CREATE, "optim.name", settings.name)
    made: MasterOptimizer = create(settings, groups, lr, Context(fused, seed, norms))
    return made


def _of_rule(
    settings: OptimSettings,
    rule: type[UpdateRule],
    groups: Sequence[dict[str, Any]],
    lr: float,
    fused: bool | None = None,
) -> MasterOptimizer:
    """A rule from outside, with `optim.arguments` as its hyper-parameters."""
    check_rule(rule)
    arguments = settings.arguments_table()
    fields = rule.Hyper._fields
    if unknown := sorted(set(arguments) - set(fields)):
        raise ConfigError(
            "optim.arguments", settings.arguments,
            f"{settings.name} has no {unknown[0]!r}", f"it has {', '.join(fields)}",
        )  # fmt: skip

    def create(made: list[dict[str, Any]]) -> MasterOptimizer:
        defaults = {"lr": lr, "weight_decay": settings.weight_decay, **arguments}
        own = {name: value for name, value in defaults.items() if name in fields}
        return MasterOptimizer(made, own, rule, fused=fused)

    return wrap("optim.name", settings.name, create, groups)


def _create_class(
    settings: OptimSettings, groups: Sequence[dict[str, Any]], lr: float
) -> MasterOptimizer:
    found = import_object("optim.name", settings.name)
    # A file may name any class of torch.optim (config/trust.py), which contains more than optimizers.
    of_torch = settings.name.startswith("torch.optim:")
    is_optimizer = isinstance(found, type) and issubclass(found, Optimizer)
    if not callable(found) or (of_torch and not is_optimizer):
        raise ConfigError(
            "optim.name", settings.name, "is not an optimizer", "name an optimizer's class"
        )
    if isinstance(found, type) and issubclass(found, UpdateRule):
        return _of_rule(settings, found, groups, lr)
    arguments = settings.arguments_table()

    def create(made: list[dict[str, Any]]) -> Any:
        return found(made, lr=lr, **arguments)

    return wrap("optim.name", settings.name, create, groups, found)


# The first children of ResNets, also of torchvision's and timm's, are one layer: their stem.
_STEM = re.compile(r"(conv1|bn1|norm1|norm0|features\.0|stem)(\.|$)")


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Number of each parameter's layer, from 0, by name.

    timm's models say themselves what a layer is (`group_matcher`). In others it is a child of the
    model, in the order of their first parameters: a stage of a ResNet. Members of a list, such as
    `blocks.3` or `features.4`, are layers of their own.
    """
    names = [name for name, _ in model.named_parameters()]
    if callable(matcher := getattr(model, "group_matcher", None)):
        found = _by_timm(model, matcher)
        if found.keys() >= set(names):
            return {name: found[name] for name in names}
    numbers: dict[str, int] = {}
    layers: dict[str, int] = {}
    for name in names:
        numbers[name] = layers.setdefault(_layer(name), len(layers))
    return numbers


def _by_timm(model: nn.Module, matcher: Any) -> dict[str, int]:
    """By timm's own function, where timm is installed."""
    try:
        manipulate = importlib.import_module("timm.models")
    except ImportError:
        return {}
    by_layer = manipulate.group_parameters(model, matcher(coarse=False), reverse=True)
    order = {number: place for place, number in enumerate(sorted(set(by_layer.values())))}
    return {name: order[number] for name, number in by_layer.items()}


def _layer(name: str) -> str:
    # Parameters of the model itself are such as a class token: they are added to the stem's outputs.
    if _STEM.match(name) or "." not in name:
        return "stem"
    # `layer1.0.conv1.weight` is of layer1; `blocks.3.attn.qkv.weight` of blocks.3.
    first, *rest = name.split(".")
    numbered = bool(rest) and rest[0].isdigit() and not first[-1].isdigit()
    return f"{first}.{rest[0]}" if numbered else first


def with_layer_decay(
    groups: Sequence[dict[str, Any]], model: nn.Module, decay: float
) -> list[dict[str, Any]]:
    """Splits each group by layer, first layers first; `decay` 1 leaves the groups as they are."""
    if decay == 1:
        return list(groups)
    by_name = layer_numbers(model)
    numbers = {id(p): by_name[name] for name, p in model.named_parameters()}
    last = max(numbers.values())
    if last == 0:
        raise ConfigError(
            "optim.layer_decay", decay, "this model has one layer only", "leave it at 1"
        )
    made = []
    for group in groups:
        by_layer: dict[int, list[nn.Parameter]] = {}
        for p in group["params"]:
            by_layer.setdefault(numbers[id(p)], []).append(p)
        for number in sorted(by_layer):
            scale = float(decay ** (last - number))
            made.append(group | {"params": by_layer[number], "lr_scale": scale})
    return made


def describe_layers(groups: Sequence[dict[str, Any]]) -> str:
    """How far the rates of layers are apart; empty where all are the same."""
    scales = {group.get("lr_scale", 1.0) for group in groups}
    if scales == {1.0}:
        return ""
    return (
        f"{len(scales)} layer rates from {min(scales):.3g} to {max(scales):.3g} of the schedule's"
    )
