"""`create_model`: from a name to a network.

In: checked settings, and what the data says: classes, channels, edge of the images in pixels.
Out: a freshly initialised `nn.Module` on the current device, drawn from torch's global generator.
"""

from __future__ import annotations

from torch import nn

from paceline.core.errors import ConfigError
from paceline.models.alexnet import MIN_PIXELS, NORM_NAMES, AlexNet, AlexNet2012
from paceline.models.resnet import RESNET_LAYOUTS, ResNet
from paceline.models.settings import ModelSettings, check_model_name
from paceline.models.small_resnet import SmallResNet


def create_model(
    settings: ModelSettings, *, num_classes: int, in_channels: int = 3, image_size: int = 224
) -> nn.Module:
    """Builds the model that `settings.name` names.

    `num_classes` is what the caller settled on; `settings.num_classes` is its wish and not read
    here. Raises ConfigError where the name is unknown or the images are too small for the model.
    """
    name = settings.name
    check_model_name(name)
    if name in RESNET_LAYOUTS:
        block, depths = RESNET_LAYOUTS[name]
        return ResNet(
            block,
            depths,
            num_classes=num_classes,
            in_channels=in_channels,
            stem=settings.stem_for(image_size),
            zero_init_gamma=settings.zero_init_gamma,
        )
    if name == "resnet_tiny":
        return SmallResNet(
            num_classes=num_classes,
            in_channels=in_channels,
            zero_init_gamma=settings.zero_init_gamma,
        )
    return _create_alexnet(settings, num_classes, in_channels, image_size)


def _create_alexnet(
    settings: ModelSettings, num_classes: int, in_channels: int, image_size: int
) -> nn.Module:
    if image_size < MIN_PIXELS:
        raise ConfigError(
            "model.name",
            settings.name,
            f"needs images of at least {MIN_PIXELS} pixels, and these have {image_size}",
            "use 'resnet_tiny' or 'resnet18', or larger images",
        )
    if settings.name == "alexnet2012":
        return AlexNet2012(
            num_classes=num_classes, in_channels=in_channels, dropout=settings.dropout
        )
    assert settings.name in ("alexnet", "alexnet_bn"), settings.name
    return AlexNet(
        num_classes=num_classes,
        in_channels=in_channels,
        dropout=settings.dropout,
        norms=_norms(settings) if settings.name == "alexnet_bn" else (),
    )


def _norms(settings: ModelSettings) -> tuple[str, ...]:
    return tuple(name for name in NORM_NAMES if settings.pool5_norm or name != "bn_pool5")
