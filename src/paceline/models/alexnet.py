"""AlexNet as in torchvision, with optional batch norms, and the original AlexNet of 2012.

`AlexNet` has torchvision's layers and keys (Krizhevsky 2014, one column of "One weird trick").
`AlexNet2012` is the network of Krizhevsky et al. 2012, with two groups and local response normalization.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import torch.nn.functional as F
from torch import Tensor, nn

# Smaller images are too small for the last of the three pools.
MIN_PIXELS = 63
POOLED_PIXELS = 6
HIDDEN_FEATURES = 4096

# A batch norm after each convolution, named by its number in `features`, and one after pool5.
CONVOLUTIONS = (0, 3, 6, 8, 10)
NORM_NAMES = ("bn0", "bn3", "bn6", "bn8", "bn10", "bn_pool5")


class AlexNet(nn.Module):
    """torchvision's AlexNet with optional batch norms.

    Batch norms have separate names in `features`, and convolutions keep number and bias. Therefore
    weights of a plain AlexNet load into one with batch norms and vice versa.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        dropout: Dropout probability.
        norms: Names of the batch norms to add, from `NORM_NAMES`.
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
        return self.head(self.features(x))

    def head(self, x: Tensor) -> Tensor:
        """Computes the logits from the output of `features`."""
        logits: Tensor = self.classifier(self.avgpool(x).flatten(1))
        return logits


class LocalResponseNorm(nn.Module):
    """b = a / (k + alpha * sum of a² over n neighboring channels)^beta, with the paper's values.

    Computes in float32, because squares of values above 256 overflow float16.
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
    """The original AlexNet: 96/256/384/384/256 channels, two groups in conv2, conv4 and conv5.

    With the paper's 224 pixels, conv1 needs a padding of 2 for the paper's 55x55 outputs. 227 pixels end
    in 6x6 outputs too.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        dropout: Dropout probability.
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
        """Draws weights from N(0, 0.01²).

        Biases are 1 in conv2, 4, 5 and the hidden layers, for positive inputs of their ReLUs at the
        start, and 0 in other layers.
        """
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
