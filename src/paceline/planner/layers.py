"""Describes the layers of networks, without torch.

`network` returns the layers of a built-in model for an image size. Each layer has its operations, the
activations that it moves or keeps for the backward pass, and its trained tensors, named as in the model.
`paceline.planner.analytic_workload` computes the times of a step from the layers, and
`paceline.planner.memory` the memory. `paceline.rehearsal.layer_count` traces other models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from paceline.core.errors import ConfigError, nearest

# `accel.stem` rewrites some first convolutions so that windows of pixels become channels. By (channels,
# kernel, stride) of the original convolution: kernel and channels of the rewritten convolution.
_WINDOWS = {(3, 11, 4): (3, 64), (3, 3, 1): (1, 32)}
# torch stores the index of a maximum in 8 bytes, our fused kernels in one.
INDEX_BYTES = 8


@dataclass(frozen=True)
class NetTensor:
    """A trained tensor. `half` is False for biases and norms, which are fp32 even in half precision."""

    name: str
    elements: int
    half: bool


@dataclass(frozen=True)
class Recomputable:
    """An activation that backward can recompute from `inputs` activations of the same size."""

    elements: float
    inputs: int


@dataclass(frozen=True)
class Layer:
    """The cost of a layer for one image: operations, memory traffic and stored activations.

    Attributes:
        name: The name of the layer.
        flops: Operations of the forward pass; a multiply-add is two operations.
        moved: Elements that the forward pass reads and writes.
        tensors: The trained tensors of the layer.
        depth: The number of terms in each sum of a matrix product (input channels times kernel area); 0
            for layers without a matrix product.
        kept: Elements that are stored for the backward pass.
        unfused: Further elements that are stored if Paceline's fused kernels do not run.
        indices: The number of max-pool outputs, whose argmax indices are stored.
        recomputable: The part of `kept` that can be recomputed in the backward pass.
        recomputed: True if `recomputable` is recomputed instead of stored.
        half_kept: Stored elements in half precision, in units of two bytes; None if equal to `kept`. They
            differ because autocast stores copies and some fp32 inputs.
        windows: Elements that a first convolution stores instead of the images if Paceline's fused
            kernels run (see `_WINDOWS`).
    """

    name: str
    flops: float
    moved: float
    tensors: tuple[NetTensor, ...] = ()
    depth: int = 0
    kept: float = 0.0
    unfused: float = 0.0
    indices: float = 0.0
    recomputable: Recomputable | None = None
    recomputed: bool = False
    half_kept: float | None = None
    windows: float = 0.0

    @property
    def recomputed_elements(self) -> float:
        """Elements of activations that the backward pass recomputes."""
        return self.recomputable.elements if self.recomputable and self.recomputed else 0.0

    @property
    def recompute_traffic(self) -> float:
        """Elements that the backward pass reads and writes to recompute activations."""
        inputs = self.recomputable.inputs if self.recomputable else 0
        return self.recomputed_elements * (inputs + 1)

    def kept_bytes(self, width: int, fused: bool) -> float:
        """Returns the bytes that the layer stores for the backward pass of one image.

        Args:
            width: The bytes of one activation element.
            fused: True if Paceline's fused kernels run.
        """
        kept = self.kept if width > 2 or self.half_kept is None else self.half_kept
        kept -= self.recomputed_elements
        if fused:
            return width * kept + self.indices
        return width * (kept + self.unfused) + INDEX_BYTES * self.indices


@dataclass(frozen=True)
class Network:
    """The layers of a model.

    Attributes:
        name: The name of the model.
        image_size: The edge length of the images in pixels.
        layers: The layers in the order of the forward pass.
        traced: True if the layers were counted from a trace.
        channels: The number of channels of an image.
    """

    name: str
    image_size: int
    layers: tuple[Layer, ...]
    traced: bool = False
    channels: int = 3

    @property
    def tensors(self) -> tuple[NetTensor, ...]:
        return tuple(tensor for layer in self.layers for tensor in layer.tensors)

    @property
    def has_fused_kernels(self) -> bool:
        """True if Paceline has fused kernels for the model; without them, torch's operators run."""
        return not self.traced and self.name != "alexnet"

    def recomputing_norms(self) -> Network:
        """Returns a copy that recomputes norms in the backward pass (`run.accel.recompute_norms`)."""
        layers = (replace(layer, recomputed=True) for layer in self.layers)
        return replace(self, layers=tuple(layers))

    @property
    def can_recompute_norms(self) -> bool:
        return any(layer.recomputable for layer in self.layers)

    @property
    def pads_images(self) -> bool:
        """True if the fused kernels need images that are padded to four channels."""
        return self.has_fused_kernels and self.channels == 3

    @property
    def flops(self) -> float:
        """Operations of the forward pass for one image."""
        return sum(layer.flops for layer in self.layers)

    @property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)


class _Builder:
    """Builds the list of a network's layers, in the order in which an image passes them."""

    def __init__(self, channels: int, size: int) -> None:
        self.channels, self.size = channels, size
        self.layers: list[Layer] = []
        # True if the current activation can be recomputed.
        self.recomputable = False

    @property
    def elements(self) -> float:
        """The number of elements of the current activation."""
        return self.channels * self.size**2

    def conv(
        self, name: str, out: int, kernel: int, stride: int = 1, padding: int | None = None,
        bias: bool = False,
    ) -> None:  # fmt: skip
        padding = kernel // 2 if padding is None else padding
        read = self.elements
        size = self._shrunk(kernel, stride, padding)
        taps, width = _WINDOWS.get((self.channels, kernel, stride), (0, 0))
        windows = 0.0 if self.layers else float(width * (size - 1 + taps) ** 2)
        depth = self.channels * kernel**2
        weights = out * depth
        self.channels, self.size = out, size
        flops = 2.0 * weights * size**2
        tensors = [NetTensor(f"{name}.weight", weights, half=True)]
        tensors += [NetTensor(f"{name}.bias", out, half=False)] if bias else []
        moved, kept = read + self.elements, self.elements
        self.layers.append(Layer(name, flops, moved, tuple(tensors), depth, kept, windows=windows))
        self.recomputable = False

    def norm(self, name: str, before: str = "product") -> None:
        """Adds a batch norm. The preceding convolution is assumed to compute its statistics.

        Args:
            name: The name of the layer.
            before: The operation that follows: `product` (a convolution), `average`, `sum` or
                `pool`. The output of the norm is stored before a `product` or an `average`; before
                a `pool` only without fused kernels; before a `sum` never.
        """
        tensors = tuple(
            NetTensor(f"{name}.{part}", self.channels, half=False) for part in ("weight", "bias")
        )
        size = self.elements
        kept = size if before in ("product", "average") else 0.0
        unfused = size if before == "pool" else 0.0
        self.recomputable = before == "product"
        part = Recomputable(size, 1) if self.recomputable else None
        self.layers.append(
            Layer(name, 4 * size, 2 * size, tensors, kept=kept, unfused=unfused, recomputable=part)
        )

    def pool(self, name: str, kernel: int, stride: int, padding: int) -> None:
        read = self.elements
        self.size = self._shrunk(kernel, stride, padding)
        size = self.elements
        self.layers.append(Layer(name, 0.0, read + size, kept=size, indices=size))
        self.recomputable = False

    def _shrunk(self, kernel: int, stride: int, padding: int) -> int:
        size = (self.size + 2 * padding - kernel) // stride + 1
        if size < 1:
            raise ConfigError("--image-size", None, "is too small for this model", "224 is usual")
        return size

    def residual_sum(self, name: str, recomputable: bool) -> None:
        """Adds a residual sum, which reads the shortcut and is fused with the norm before it.

        If the shortcut is stored, the backward pass can recompute the sum from it (`recomputable`).
        """
        size = self.elements
        self.recomputable = recomputable
        part = Recomputable(size, 2) if recomputable else None
        self.layers.append(Layer(name, 0.0, size, kept=size, recomputable=part))

    def average(self, name: str, size: int = 1) -> None:
        read = self.elements
        self.size = size
        self.layers.append(Layer(name, 0.0, read + self.elements))

    def linear(self, name: str, out: int) -> None:
        features = int(self.elements)
        self.channels, self.size = out, 1
        tensors = (
            NetTensor(f"{name}.weight", features * out, half=True),
            NetTensor(f"{name}.bias", out, half=False),
        )
        moved, kept = float(features + out), float(features)
        self.layers.append(Layer(name, 2.0 * features * out, moved, tensors, features, kept))


# Arguments: image size, classes, stem and channels of an image.
Build = Callable[[int, int, str, int], list[Layer]]
# For images up to this edge length, ResNets have the small stem (3 × 3, no pool), as in `ModelSettings`.
SMALL_STEM_MAX_PIXELS = 64
_LEAST_PIXELS = 32
# Larger than any real image. Up to this edge length, no time of a step overflows.
MOST_PIXELS = 1 << 16
_MOST_CLASSES = 10_000_000
_MOST_CHANNELS = 1024


# Built-in models whose layers are counted from a trace.
TRACED = ("resnet_tiny",)


def is_network(name: str) -> bool:
    return name in RESNETS or name in ALEXNETS


def known_network(
    name: str, image_size: int, num_classes: int = 1000, stem: str = "auto", channels: int = 3
) -> Network | None:
    """Returns the layers of a built-in model.

    Returns None if the model is unknown or the image size is not supported.
    """
    known = is_network(name) and _LEAST_PIXELS <= image_size <= MOST_PIXELS
    return network(name, image_size, num_classes, stem, channels) if known else None


def network(
    name: str, image_size: int = 224, num_classes: int = 1000, stem: str = "auto", channels: int = 3
) -> Network:
    """Returns the layers of a built-in model.

    Args:
        name: The name of the model.
        image_size: The edge length of the images in pixels.
        num_classes: The number of outputs of the model.
        stem: The stem of a ResNet: `imagenet`, `small`, or `auto` for the choice of training.
        channels: The number of channels of an image.

    Raises:
        ConfigError: If the planner does not know the model, or a number is out of range.
    """
    if stem == "auto":
        stem = "small" if image_size <= SMALL_STEM_MAX_PIXELS else "imagenet"
    known: dict[str, Build] = {**RESNETS, **ALEXNETS}
    if name not in known:
        names = (*known, *TRACED)
        remedy = f"{nearest(name, names)} (others as timm:NAME or module:factory, or by --profile)"
        raise ConfigError("--model", name, "unknown to the planner", remedy)
    check_image_size(image_size, _LEAST_PIXELS)
    check_ends(num_classes, channels)
    layers = tuple(known[name](image_size, num_classes, stem, channels))
    return Network(name, image_size, layers, channels=channels)


def check_image_size(pixels: int, least: int = 1) -> None:
    """Raises ConfigError if the image size is out of range."""
    if not least <= pixels <= MOST_PIXELS:
        problem = f"must be from {least} to {MOST_PIXELS:,}"
        raise ConfigError("--image-size", pixels, problem, "224 is usual")


def check_ends(classes: int, channels: int) -> None:
    """Raises ConfigError if the number of classes or of image channels is out of range."""
    for flag, value, most in (
        ("--classes", classes, _MOST_CLASSES),
        ("--channels", channels, _MOST_CHANNELS),
    ):
        if not 1 <= value <= most:
            raise ConfigError(flag, value, f"must be from 1 to {most:,}")


_DEPTHS = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
_WIDE = ("resnet50", "resnet101", "resnet152")


def _resnet(
    name: str, image_size: int, num_classes: int, stem: str, image_channels: int
) -> list[Layer]:
    trace = _Builder(image_channels, image_size)
    if stem == "small":
        trace.conv("conv1", 64, 3)
        trace.norm("bn1")
    else:
        trace.conv("conv1", 64, 7, 2, 3)
        trace.norm("bn1", before="pool")
        trace.pool("maxpool", 3, 2, 1)
    for number, depth in enumerate(_DEPTHS[name]):
        for block in range(depth):
            stride = 2 if number > 0 and block == 0 else 1
            _block(trace, f"layer{number + 1}.{block}", 64 << number, stride, name in _WIDE)
    trace.average("avgpool")
    trace.linear("fc", num_classes)
    return trace.layers


def _block(trace: _Builder, name: str, channels: int, stride: int, wide: bool) -> None:
    entry, is_stored = (trace.channels, trace.size), not trace.recomputable
    kernels = ((1, 1), (3, stride), (1, 1)) if wide else ((3, stride), (3, 1))
    for number, (kernel, step) in enumerate(kernels, 1):
        out = channels * 4 if wide and number == 3 else channels
        trace.conv(f"{name}.conv{number}", out, kernel, step)
        trace.norm(f"{name}.bn{number}", before="product" if number < len(kernels) else "sum")
    leaving = trace.channels, trace.size
    if entry != leaving:
        trace.channels, trace.size = entry
        trace.conv(f"{name}.downsample.0", leaving[0], 1, stride, 0)
        trace.norm(f"{name}.downsample.1", before="sum")
    trace.channels, trace.size = leaving
    trace.residual_sum(f"{name}.sum", recomputable=is_stored and entry == leaving)


_FAST_CHANNELS = (64, 64, 256, 256)


def _resnet_fast(image_size: int, num_classes: int, _stem: str, image_channels: int) -> list[Layer]:
    trace = _Builder(image_channels, image_size)
    trace.conv("conv1", _FAST_CHANNELS[0], 3)
    trace.norm("bn1")
    for number, channels in enumerate(_FAST_CHANNELS[1:], 1):
        trace.conv(f"layer{number}.0.conv", channels, 3)
        trace.norm(f"layer{number}.0.bn", before="pool")
        trace.pool(f"layer{number}.0.maxpool", 3, 2, 1)
        _block(trace, f"layer{number}.1", channels, 1, wide=False)
    trace.average("maximum")
    trace.linear("fc", num_classes)
    return trace.layers


RESNETS: dict[str, Build] = {
    **{name: partial(_resnet, name) for name in _DEPTHS},
    "resnet_fast": _resnet_fast,
}


# For each convolution: index in `features`, channels, kernel, stride, padding, True if a pool follows.
_CONVOLUTIONS = (
    (0, 64, 11, 4, 2, True),
    (3, 192, 5, 1, 2, True),
    (6, 384, 3, 1, 1, False),
    (8, 256, 3, 1, 1, False),
    (10, 256, 3, 1, 1, True),
)
_HIDDEN, _POOLED = 4096, 6


def _alexnet(
    norms: bool, image_size: int, num_classes: int, _stem: str, image_channels: int
) -> list[Layer]:
    trace = _Builder(image_channels, image_size)
    for number, channels, kernel, stride, padding, pooled in _CONVOLUTIONS:
        trace.conv(f"features.{number}", channels, kernel, stride, padding, bias=True)
        if norms:
            trace.norm(f"features.bn{number}", before="pool" if pooled else "product")
        else:
            # A ReLU that overwrites its input.
            trace.layers.append(Layer(f"features.{number + 1}", 0.0, 2.0 * trace.elements))
        if pooled:
            trace.pool(f"features.{number + 2}", 3, 2, 0)
    if norms:
        trace.norm("features.bn_pool5", before="average")
    trace.average("avgpool", _POOLED)
    trace.linear("classifier.1", _HIDDEN)
    trace.linear("classifier.4", _HIDDEN)
    trace.linear("classifier.6", num_classes)
    return trace.layers


ALEXNETS: dict[str, Build] = {
    "alexnet": partial(_alexnet, False),
    "alexnet_bn": partial(_alexnet, True),
}
