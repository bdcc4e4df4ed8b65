"""Creates the optimizer of `OptimSettings` for the groups of `paceline.models.parameter_groups`, and
divides these groups by depth for layer-wise decay of the learning rate.

With `layer_decay` the last layer has the full rate, each layer before it `decay` times that of the next,
as in timm.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from paceline.core.errors import ConfigError
from paceline.core.imports import import_object
from paceline.optim.adam import LAMB, AdamW
from paceline.optim.base import MasterOptimizer
from paceline.optim.fused import triton_unavailable
from paceline.optim.lars import LARS, SGD
from paceline.optim.muon import STEP_FACTOR, Muon, split_matrices
from paceline.optim.rms_warmup import RMSpropWarmup
from paceline.optim.settings import OPTIMIZERS_OF_SVRG, OptimSettings
from paceline.optim.svrg import SVRG
from paceline.optim.wrapped import wrap

# Nets with more orthogonalized matrices without a norm have shorter steps of fixed length; shorter ones
# than by this factor have not been tried.
SHALLOW_MATRICES, LEAST_STEP_FACTOR = 4, 0.5


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
    if settings.name in OPTIMIZERS_OF_SVRG:
        return SVRG(
            groups, lr, form=settings.name, bits=settings.bits, mu=settings.halp_mu, seed=seed
        )
    if settings.name == "rmsprop_warmup":
        return RMSpropWarmup(groups, lr, settings.momentum, eps=settings.adam_eps)
    if settings.name in ("adamw", "lamb"):
        return _create_adam(settings, groups, lr, fused)
    common: dict[str, Any] = {
        "lr": lr, "momentum": settings.momentum, "nesterov": settings.nesterov, "fused": fused,
    }  # fmt: skip
    if settings.name == "sgd":
        return SGD(groups, **common)
    common["trust_coefficient"] = settings.trust_coefficient
    if settings.name == "muon":
        return Muon(_muon_groups(settings, groups, norms), **common)
    assert settings.name == "lars", settings.name
    return LARS(groups, **common, clip=settings.clip, adapt_bias_norm=settings.adapt_bias_norm)


def _create_adam(
    settings: OptimSettings, groups: Sequence[dict[str, Any]], lr: float, fused: bool | None
) -> MasterOptimizer:
    betas = (settings.beta1, settings.beta2)
    if settings.name == "adamw":
        return AdamW(groups, lr, betas, settings.adam_eps, fused=fused)
    return LAMB(
        groups,
        lr,
        betas,
        settings.adam_eps,
        clip=settings.clip,
        adapt_bias_norm=settings.adapt_bias_norm,
        fused=fused,
    )


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
    arguments = settings.arguments_table()

    def create(made: list[dict[str, Any]]) -> Any:
        return found(made, lr=lr, **arguments)

    return wrap("optim.name", settings.name, create, groups, found)


def _is_adapted(settings: OptimSettings, group: dict[str, Any]) -> bool:
    return settings.adapt_bias_norm or group.get("role") != "bias_norm"


def orthogonal_layers(wanted: str, groups: Sequence[dict[str, Any]]) -> str:
    """What `auto` means for these groups: `all` in a perceptron, a transformer or ConvNeXt. The last
    linear layer, the classifier, does not count: with many classes it is large in every net."""
    if wanted != "auto":
        return wanted
    matrices = [p for group in groups for p in split_matrices(group, 2)[0]]
    linear = [p.numel() for p in matrices if p.dim() == 2][:-1]
    filters = [p.numel() for p in matrices if p.dim() > 2]
    return "all" if sum(linear) >= sum(filters) else "filters"


def has_fixed_steps(wanted: str, matrices: Sequence[Tensor], norms: int) -> bool:
    """What `auto` means for a net with these orthogonalized matrices and so many norm layers: with
    fewer norms, some matrix has none behind it that would undo the growth of its weights. The last
    linear layer, which never has one, counts only where it is alone."""
    hidden = len(matrices) - any(p.dim() == 2 for p in matrices)
    needed = max(hidden, 1) if matrices else 0
    return wanted == "fixed" or (wanted == "auto" and norms < needed)


def fixed_step_factor(bare: int) -> float:
    """Steps of fixed length shorten with the number of orthogonalized matrices that have no norm layer:
    the changes of L such layers add up as √L in the net's output."""
    return max(LEAST_STEP_FACTOR, math.sqrt(min(1.0, SHALLOW_MATRICES / max(bare, 1))))


def _muon_groups(
    settings: OptimSettings, groups: Sequence[dict[str, Any]], norms: int
) -> list[dict[str, Any]]:
    """Splits a group in two where only some of its tensors are orthogonalized."""
    least_dims = 3 if orthogonal_layers(settings.orthogonal, groups) == "filters" else 2
    matrices = [p for group in groups for p in split_matrices(group, least_dims)[0]]
    more: dict[str, Any] = {"adapt": True, "orthogonal": True}
    more["fixed_steps"] = has_fixed_steps(settings.muon_steps, matrices, norms)
    # Momentum multiplies the rate of a LARS layer by 1 / (1 − m); this keeps the step sizes equal.
    eta = settings.trust_coefficient / (1 - settings.momentum)
    if more["fixed_steps"] and settings.muon_steps == "auto":
        more[STEP_FACTOR] = fixed_step_factor(len(matrices) - norms)
        eta *= more[STEP_FACTOR]
    made = []
    for group in groups:
        orthogonal, rest = split_matrices(group, least_dims)
        if orthogonal:
            made.append(group | {"params": orthogonal, "trust_coefficient": eta} | more)
        if rest or not orthogonal:
            adapted = _is_adapted(settings, group)
            made.append(group | {"params": rest, "adapt": adapted, "orthogonal": False})
    return made


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
