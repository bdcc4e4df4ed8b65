"""Creates models by name, builds parameter groups, and freezes parameters.

A batch norm whose parameters are all frozen runs in evaluation mode: the layer normalizes with the
running statistics and does not update them. Otherwise a frozen layer would still adapt to the new data.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from paceline.core.errors import ConfigError
from paceline.models.alexnet import MIN_PIXELS, NORM_NAMES, AlexNet
from paceline.models.factories import create_foreign_model
from paceline.models.resnet import RESNET_LAYOUTS, FastResNet, ResNet, SmallResNet
from paceline.models.settings import MODEL_NAMES, ModelSettings, check_model_name, nearest_of_many

WEIGHT = "weight"
BIAS_NORM = "bias_norm"
_SMALL: dict[str, type[SmallResNet] | type[FastResNet]] = {
    "resnet_tiny": SmallResNet,
    "resnet_fast": FastResNet,
}
# `_NormBase` is the base of every BatchNorm, SyncBatchNorm and InstanceNorm.
_NORM_TYPES = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def create_model(
    settings: ModelSettings, *, num_classes: int, in_channels: int = 3, image_size: int = 224
) -> nn.Module:
    """Creates a model on the current device, in training mode.

    torch's global random generator initializes the weights.

    Args:
        settings: Name and options of the model, and patterns of parameters to freeze.
        num_classes: Number of classes; overrides `settings.num_classes`.
        in_channels: Channels of the images.
        image_size: Side of the images in pixels.

    Returns:
        The model.

    Raises:
        ConfigError: If the model is unknown or cannot be created, or if it needs larger images.

    Example:
        >>> model = create_model(ModelSettings(name="resnet18"), num_classes=10, image_size=32)
    """
    check_model_name(settings.name)
    if settings.name in MODEL_NAMES:
        model = _create_own(settings, num_classes, in_channels, image_size)
    else:
        offered = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
        model = create_foreign_model(settings.name, settings.arguments_table(), offered)
    freeze_parameters(model, settings.freeze)
    return model


def is_own(model: nn.Module) -> bool:
    """Returns True if the model is part of Paceline."""
    return type(model).__module__.startswith("paceline.models.")


def _create_own(
    settings: ModelSettings, num_classes: int, in_channels: int, image_size: int
) -> nn.Module:
    name = settings.name
    if name in RESNET_LAYOUTS:
        block, depths = RESNET_LAYOUTS[name]
        return ResNet(
            block, depths, num_classes=num_classes, in_channels=in_channels,
            stem=settings.stem_for(image_size), zero_init_gamma=settings.zero_init_gamma,
        )  # fmt: skip
    if name in _SMALL:
        return _SMALL[name](
            num_classes=num_classes,
            in_channels=in_channels,
            zero_init_gamma=settings.zero_init_gamma,
        )
    if image_size < MIN_PIXELS:
        raise ConfigError(
            "model.name",
            name,
            f"needs images of at least {MIN_PIXELS} pixels, but these have {image_size}",
            "use 'resnet_tiny' or 'resnet18', or larger images",
        )
    norms = NORM_NAMES if name == "alexnet_bn" else ()
    return AlexNet(
        num_classes=num_classes, in_channels=in_channels, dropout=settings.dropout, norms=norms
    )


def _owned(model: nn.Module) -> dict[int, tuple[str, nn.Parameter, str]]:
    """Returns (name, parameter, role) for each parameter, by the `id` of the parameter.

    Biases, parameters of norm layers, scales and all other vectors have the role `bias_norm`. So do the
    parameters in `no_weight_decay` of a timm model, such as position embeddings. A parameter that
    several modules share has the role `weight` if at least one module uses it as a weight.
    """
    listed: set[str] = set()
    if callable(getattr(model, "no_weight_decay", None)):
        listed = {str(name) for name in model.no_weight_decay()}  # type: ignore[operator]
    owned: dict[int, tuple[str, nn.Parameter, str]] = {}
    for path, module in model.named_modules():
        is_norm = isinstance(module, _NORM_TYPES)
        for own_name, parameter in module.named_parameters(recurse=False):
            # Attention layers have "in_proj_bias", recurrent layers "bias_hh_l0".
            is_bias = own_name.startswith("bias") or own_name.endswith("_bias")
            name = f"{path}.{own_name}" if path else own_name
            is_vector = parameter.ndim <= 1 or name in listed
            role = BIAS_NORM if is_norm or is_bias or is_vector else WEIGHT
            if id(parameter) in owned:
                name, _, earlier = owned[id(parameter)]
                role = WEIGHT if WEIGHT in (role, earlier) else BIAS_NORM
            owned[id(parameter)] = (name, parameter, role)
    return owned


def named_roles(model: nn.Module) -> dict[str, str]:
    """Returns the role, `weight` or `bias_norm`, of each parameter (also if frozen), by name."""
    return {name: role for name, _, role in _owned(model).values()}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Splits the trained parameters into a group with weight decay and a group without.

    At large batches, weight decay of biases and normalization parameters costs accuracy.

    Args:
        model: The model.
        weight_decay: Weight decay of the group with role `weight`.

    Returns:
        A group with role `weight` and a group with role `bias_norm`. Empty groups are omitted.

    Example:
        >>> optimizer = LARS(parameter_groups(model, 5e-5), lr=11.0)
    """
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": weight_decay, "role": WEIGHT},
        {"params": [], "weight_decay": 0.0, "role": BIAS_NORM},
    ]
    for _, parameter, role in _owned(model).values():
        if parameter.requires_grad:
            groups[0 if role == WEIGHT else 1]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freezes parameters; sets the model to training mode and frozen batch norms to evaluation mode.

    Args:
        model: Model whose parameters are frozen in place.
        patterns: Globs of parameter names (`layer1.*`, `*.bias`), or names of modules.

    Raises:
        ConfigError: If a pattern matches nothing, or if no parameter remains to train.
    """
    # If modules share a parameter, any of the parameter's names freezes it.
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matching = [
            parameter
            for name, parameter in named
            if fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
        ]
        if not matching:
            known = {name for name, _ in (*named, *model.named_modules()) if name}
            remedy = nearest_of_many(pattern.rstrip(".*"), known, "model.named_parameters()")
            raise ConfigError("model.freeze", pattern, "matches no parameter", remedy)
        for parameter in matching:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError(
            "model.freeze", list(patterns), "leaves no parameter to train", "freeze less"
        )
    model.train()
    for layer in frozen_norms(model):
        layer.eval()


def frozen_norms(model: nn.Module) -> list[nn.Module]:
    """Returns the batch norms all of whose parameters are frozen."""
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, _BatchNorm)
        and list(layer.parameters(recurse=False))
        and not any(p.requires_grad for p in layer.parameters(recurse=False))
    ]


def count_norms(model: nn.Module) -> int:
    """Counts the norm layers that compute batch statistics.

    Frozen batch norms are not counted, because they only scale and shift.
    """
    frozen = set(frozen_norms(model))
    return sum(isinstance(m, _NORM_TYPES) and m not in frozen for m in model.modules())


def count_frozen(model: nn.Module) -> int:
    """Returns the number of frozen parameter elements."""
    return sum(p.numel() for p in model.parameters() if not p.requires_grad)
