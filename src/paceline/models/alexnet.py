"""AlexNet in three forms: torchvision's, the same with batch norm, and the original of 2012.

`AlexNet` has torchvision's layers and keys (Krizhevsky 2014, one column of "One weird trick") and
optional batch norms; `AlexNet2012` is Krizhevsky et al. 2012 with two groups and local response
normalization.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.recompute import RecomputedMap, not_stored
from paceline.models.resnet import Uses, norm_can_fuse, norm_relu, split_uses
from paceline.models.stem import (
    PADDED_CHANNELS,
    TakesImages,
    can_launch,
    convolve_images,
    is_plain,
)  # fmt: skip

# Smaller images leave no window for the last of the three pools.
MIN_PIXELS = 63
POOLED_PIXELS = 6
HIDDEN_FEATURES = 4096

# A batch norm after each convolution, named by its number in `features`, and one after pool5.
CONVOLUTIONS = (0, 3, 6, 8, 10)
NORM_NAMES = ("bn0", "bn3", "bn6", "bn8", "bn10", "bn_pool5")


class AlexNet(TakesImages):
    """torchvision's AlexNet; `norms` lists the batch norms to add, out of `NORM_NAMES`.

    Batch norms have their own names inside `features`, and convolutions keep number and bias, so that
    weights of a plain AlexNet load into this one and vice versa.
    """

    def __init__(
        self,
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        dropout: float = 0.5,
        norms: Collection[str] = (),
    ) -> None:
        super().__init__()
        assert set(norms) <= set(NORM_NAMES), norms
        if set(NORM_NAMES[:-1]) <= set(norms):
            self.fused = False  # has a fused form, see `fuse_norms`
            self.recompute = False  # has norms before convolutions, see `recompute_norms`
        plain: list[nn.Module] = [
            nn.Conv2d(in_channels, 64, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
        ]
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        channels = in_channels
        for number, layer in enumerate(plain):
            layers[str(number)] = layer
            if isinstance(layer, nn.Conv2d):
                channels = layer.out_channels
            if f"bn{number}" in norms:
                layers[f"bn{number}"] = nn.BatchNorm2d(channels)
        if "bn_pool5" in norms:
            layers["bn_pool5"] = nn.BatchNorm2d(channels)
        self.features = nn.Sequential(layers)
        self.avgpool = nn.AdaptiveAvgPool2d(POOLED_PIXELS)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(channels * POOLED_PIXELS**2, HIDDEN_FEATURES),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(HIDDEN_FEATURES, HIDDEN_FEATURES),
            nn.ReLU(inplace=True),
            nn.Linear(HIDDEN_FEATURES, num_classes),
        )

    @property
    def added_norm_prefixes(self) -> tuple[str, ...]:
        """Key prefixes of batch norms that a torchvision file does not have."""
        return tuple(f"features.{name}." for name in NORM_NAMES if hasattr(self.features, name))

    def forward(self, x: Tensor) -> Tensor:
        if self._can_fuse(x):
            maps = self.fused_features(x)
        elif getattr(self, "recompute", False) and torch.is_grad_enabled():
            maps = self.recomputed_features(x)
        elif self._are_padded(x):
            maps = self.features[1:](self._convolve_images(x))
        else:
            maps = self.features(x)
        logits: Tensor = self.classifier(self.avgpool(maps).flatten(1))
        return logits

    def _can_fuse(self, x: Tensor) -> bool:
        return (
            getattr(self, "fused", False)
            and self.training
            and can_launch(x)
            and all(norm_can_fuse(module) for module in self.features)
            and all(is_plain(self.features.get_submodule(str(number))) for number in CONVOLUTIONS)
        )

    @property
    def first_convolution(self) -> nn.Module:
        return self.features[0]

    @property
    def pads_images(self) -> bool:
        return hasattr(self, "fused") and super().pads_images

    def _are_padded(self, x: Tensor) -> bool:
        """Whether images have the fourth channel that the fused form takes. Evaluation gets them, too."""
        padded = getattr(self, "fused", False) and self.pads_images
        return padded and x.shape[1] == PADDED_CHANNELS

    def _convolve_images(self, x: Tensor) -> Tensor:
        first = self.features[0]
        assert isinstance(first, nn.Conv2d)
        return convolve_images(first, x, padded=True)

    def fused_features(self, images: Tensor) -> Tensor:
        """`features` with norm, ReLU and pool after each convolution in one kernel."""
        from paceline.models.fused import as_map, norm_act, norm_act_pool, norm_act_recomputed

        recompute = self.recompute and torch.is_grad_enabled()
        maps: Uses = images
        for number in CONVOLUTIONS:
            convolution = self.features.get_submodule(str(number))
            norm = self.features.get_submodule(f"bn{number}")
            assert isinstance(convolution, nn.Conv2d)
            assert isinstance(norm, nn.BatchNorm2d)
            bias = convolution.bias
            given, _ = split_uses(maps)
            with not_stored(maps):
                if given is images:
                    x = convolve_images(convolution, given, padded=self.pads_images, biased=False)
                else:
                    assert not isinstance(convolution.padding, str)
                    x = nn.functional.conv2d(
                        given, convolution.weight, None, convolution.stride, convolution.padding
                    )
            x = as_map(x)
            if isinstance(self.features.get_submodule(str(number + 2)), nn.MaxPool2d):
                maps = norm_act_pool(x, norm, padding=0, bias=bias)
            elif recompute:
                maps = norm_act_recomputed(x, norm, bias=bias)
            else:
                maps = norm_act(x, norm, bias=bias)
        x, _ = split_uses(maps)
        last = getattr(self.features, "bn_pool5", None)
        return x if last is None else norm_act(x, last, relu=False)

    def recomputed_features(self, x: Tensor) -> Tensor:
        """`features` without stored maps between norm, ReLU and convolution."""
        layers = list(self.features.children())
        maps: Uses = self._convolve_images(x) if self._are_padded(x) else layers[0](x)
        for index, layer in enumerate(layers[1:], 1):
            if isinstance(layer, nn.ReLU) and isinstance(maps, RecomputedMap):
                continue  # part of the norm
            given, _ = split_uses(maps)
            after = [type(later) for later in layers[index + 1 : index + 3]]
            if isinstance(layer, nn.BatchNorm2d) and after == [nn.ReLU, nn.Conv2d]:
                relu = layers[index + 1]
                maps = norm_relu(given, layer, relu, fused=False, recompute=True)
            else:
                with not_stored(maps):
                    maps = layer(given)
        out, _ = split_uses(maps)
        return out


class LocalResponseNorm(nn.Module):
    """b = a / (k + alpha * sum of a² over n neighboring channels)^beta, with the paper's values.

    Computed in float32: squares of values above 256 overflow float16.
    """

    neighbours = 5
    k = 2.0
    alpha = 1e-4
    beta = 0.75

    def forward(self, x: Tensor) -> Tensor:
        # torch uses the mean of the squares, the paper their sum.
        alpha = self.alpha * self.neighbours
        wide = F.local_response_norm(x.float(), self.neighbours, alpha, self.beta, self.k)
        return wide.to(x.dtype)


class AlexNet2012(nn.Module):
    """The original: 96/256/384/384/256 channels, two groups in conv2, conv4 and conv5.

    The paper's 224 pixels give its 55x55 maps only with a padding of 2; 227 pixels end in 6x6 maps as
    well.
    """

    def __init__(
        self, *, num_classes: int = 1000, in_channels: int = 3, dropout: float = 0.5
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 96, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            LocalResponseNorm(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(96, 256, 5, padding=2, groups=2),
            nn.ReLU(inplace=True),
            LocalResponseNorm(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(256, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 384, 3, padding=1, groups=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1, groups=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(POOLED_PIXELS)
        self.classifier = nn.Sequential(
            nn.Linear(256 * POOLED_PIXELS**2, HIDDEN_FEATURES),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(HIDDEN_FEATURES, HIDDEN_FEATURES),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(HIDDEN_FEATURES, num_classes),
        )
        self._init_as_published()

    def _init_as_published(self) -> None:
        """Weights from N(0, 0.01²); biases 1 in conv2, 4, 5 and the hidden layers, which makes the
        inputs of their ReLUs positive at the start, and 0 elsewhere."""
        for layer in self.modules():
            if not isinstance(layer, nn.Conv2d | nn.Linear):
                continue
            hidden = isinstance(layer, nn.Linear) and layer is not self.classifier[-1]
            grouped = isinstance(layer, nn.Conv2d) and layer.groups == 2
            nn.init.normal_(layer.weight, std=0.01)
            assert layer.bias is not None
            nn.init.constant_(layer.bias, 1.0 if hidden or grouped else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return logits
