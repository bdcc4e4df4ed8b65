"""AlexNet as in torchvision, with optional batch norms.

The layers are those of the single-GPU network in Krizhevsky 2014, "One weird trick".
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from torch import Tensor, nn

# Images with fewer pixels per side are too small for the last of the three pools.
MIN_PIXELS = 63
POOLED_PIXELS = 6
HIDDEN_FEATURES = 4096

# One batch norm after each convolution, named by the convolution's index, and one after pool5.
CONVOLUTIONS = (0, 3, 6, 8, 10)
NORM_NAMES = ("bn0", "bn3", "bn6", "bn8", "bn10", "bn_pool5")


class AlexNet(nn.Module):
    """torchvision's AlexNet with optional batch norms.

    Batch norms have names of their own in `features`, and convolutions keep their indices and
    biases. Therefore batch norms add state-dict keys and change no others.

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

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def head(self, x: Tensor) -> Tensor:
        """Computes the logits from the output of `features`."""
        logits: Tensor = self.classifier(self.avgpool(x).flatten(1))
        return logits
