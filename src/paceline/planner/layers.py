"""Networks without the framework: what each layer does to one image.

`network` gives, for a model's name and an image size, each layer's multiply-adds, the activations that
it reads, writes and keeps for the backward pass, and its trained tensors under the names that the model
itself gives them. `paceline.planner.analytic_workload` makes the times of a step of it,
`paceline.planner.memory` its memory. A model that is not here is counted from a trace
(`paceline.rehearsal.layer_count`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from paceline.core.errors import ConfigError, nearest

# By channels, kernel and stride of a first convolution, kernel and channels of its form on windows of
# pixels (`accel.stem`).
_WINDOWS = {(3, 11, 4): (3, 64), (3, 3, 1): (1, 32)}
# A place of a maximum as torch keeps it; our fused kernels keep a byte.
INDEX_BYTES = 8


@dataclass(frozen=True)
class NetTensor:
    """A trained tensor. Biases and what belongs to normalisation stay fp32 in half precision."""

    name: str
    elements: int
    half: bool


@dataclass(frozen=True)
class Again:
    """A norm's output that can be computed again: its elements, and how many maps of its size that
    reads."""

    elements: float
    inputs: int


@dataclass(frozen=True)
class Layer:
    """`flops` counts a multiply-add as two, `moved` the elements read and written, both for one image
    in the forward pass. `depth` is the length of the sums of a matrix product (input channels times
    kernel area), 0 for other layers. For the backward pass stay `kept` elements, `unfused` ones more
    where our fused kernels do not run, and the places of the maxima of a pool, `indices`. Of those kept,
    the norm's output in `again` can be computed again, which reads `again.inputs` maps of its size. Half
    precision keeps `half_kept` elements of two bytes where that is another number: autocast keeps inputs
    of some operations in fp32, and copies. Where our fused kernels run, a first convolution may keep
    `windows` elements in place of the images: windows of pixels as channels."""

    name: str
    flops: float
    moved: float
    tensors: tuple[NetTensor, ...] = ()
    depth: int = 0
    kept: float = 0.0
    unfused: float = 0.0
    indices: float = 0.0
    again: Again | None = None
    recomputed: bool = False
    half_kept: float | None = None
    windows: float = 0.0

    @property
    def remade(self) -> float:
        """Elements that the backward pass computes again."""
        return self.again.elements if self.again is not None and self.recomputed else 0.0

    @property
    def moved_again(self) -> float:
        """Elements that this reads and writes."""
        return 0.0 if self.again is None else self.remade * (self.again.inputs + 1)

    def kept_bytes(self, width: int, fused: bool) -> float:
        """Of one image, with elements of `width` bytes."""
        kept = self.kept if width > 2 or self.half_kept is None else self.half_kept
        kept -= self.remade
        if fused:
            return width * kept + self.indices
        return width * (kept + self.unfused) + INDEX_BYTES * self.indices


@dataclass(frozen=True)
class Network:
    """Layers in the order of the forward pass; `traced` where they were counted from a trace. `channels`:
    of the images."""

    name: str
    image_size: int
    layers: tuple[Layer, ...]
    traced: bool = False
    channels: int = 3

    @property
    def tensors(self) -> tuple[NetTensor, ...]:
        return tuple(tensor for layer in self.layers for tensor in layer.tensors)

    @property
    def has_fused_form(self) -> bool:
        """Whether training has fused kernels for it; other models keep what torch's operators keep."""
        return not self.traced and self.name != "alexnet"

    def recomputing_norms(self) -> Network:
        """The same with `run.accel.recompute_norms`, where the model has norms for it."""
        layers = (replace(layer, recomputed=True) for layer in self.layers)
        return replace(self, layers=tuple(layers))

    @property
    def can_recompute_norms(self) -> bool:
        return any(layer.again for layer in self.layers)

    @property
    def pads_images(self) -> bool:
        """Whether the fused form takes images with a fourth channel."""
        return self.has_fused_form and self.channels == 3

    @property
    def flops(self) -> float:
        """Of one image, forward."""
        return sum(layer.flops for layer in self.layers)

    @property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)


class Tracer:
    """Follows one image through the layers, and writes down what each does."""

    def __init__(self, channels: int, size: int) -> None:
        self.channels, self.size = channels, size
        self.layers: list[Layer] = []
        # Whether the map at hand can be computed again.
        self.again = False

    @property
    def map_elements(self) -> float:
        return self.channels * self.size**2

    def conv(
        self, name: str, out: int, kernel: int, stride: int = 1, padding: int | None = None,
        bias: bool = False,
    ) -> None:  # fmt: skip
        padding = kernel // 2 if padding is None else padding
        read = self.map_elements
        size = self._shrunk(kernel, stride, padding)
        taps, width = _WINDOWS.get((self.channels, kernel, stride), (0, 0))
        windows = 0.0 if self.layers else float(width * (size - 1 + taps) ** 2)
        depth = self.channels * kernel**2
        weights = out * depth
        self.channels, self.size = out, size
        flops = 2.0 * weights * size**2
        tensors = [NetTensor(f"{name}.weight", weights, half=True)]
        tensors += [NetTensor(f"{name}.bias", out, half=False)] if bias else []
        moved, kept = read + self.map_elements, self.map_elements
        self.layers.append(Layer(name, flops, moved, tuple(tensors), depth, kept, windows=windows))
        self.again = False

    def norm(self, name: str, before: str = "product") -> None:
        """The product before it gives the statistics, the norm reads and writes the map. Its output is
        kept before a `product` and before the classifier's `average`, not before a `sum`, and before a
        `pool` not by our fused kernels."""
        tensors = tuple(
            NetTensor(f"{name}.{part}", self.channels, half=False) for part in ("weight", "bias")
        )
        size = self.map_elements
        kept = size if before in ("product", "average") else 0.0
        unfused = size if before == "pool" else 0.0
        self.again = before == "product"
        again = Again(size, 1) if self.again else None
        self.layers.append(
            Layer(name, 4 * size, 2 * size, tensors, kept=kept, unfused=unfused, again=again)
        )

    def pool(self, name: str, kernel: int, stride: int, padding: int) -> None:
        read = self.map_elements
        self.size = self._shrunk(kernel, stride, padding)
        size = self.map_elements
        self.layers.append(Layer(name, 0.0, read + size, kept=size, indices=size))
        self.again = False

    def _shrunk(self, kernel: int, stride: int, padding: int) -> int:
        size = (self.size + 2 * padding - kernel) // stride + 1
        if size < 1:
            raise ConfigError("--image-size", None, "too small for this model", "224 is usual")
        return size

    def spread(self, name: str, times: float, kept: bool = True) -> None:
        """Elementwise work over the whole map, whose result is kept unless it takes the map's place."""
        size = self.map_elements
        self.layers.append(Layer(name, 0.0, times * size, kept=size if kept else 0.0))

    def residual_sum(self, name: str, again: bool) -> None:
        """Fused with the norm before it: one map more is read. `again`: from the norm's input and a
        shortcut that is stored."""
        size = self.map_elements
        self.again = again
        self.layers.append(
            Layer(name, 0.0, size, kept=size, again=Again(size, 2) if again else None)
        )

    def average(self, name: str, size: int = 1) -> None:
        read = self.map_elements
        self.size = size
        self.layers.append(Layer(name, 0.0, read + self.map_elements))

    def linear(self, name: str, out: int) -> None:
        features = int(self.map_elements)
        self.channels, self.size = out, 1
        tensors = (
            NetTensor(f"{name}.weight", features * out, half=True),
            NetTensor(f"{name}.bias", out, half=False),
        )
        moved, kept = float(features + out), float(features)
        self.layers.append(Layer(name, 2.0 * features * out, moved, tensors, features, kept))


# Of image size, classes, stem and channels of an image.
Build = Callable[[int, int, str, int], list[Layer]]
# Residual nets have the small stem (3 × 3, no pool) for images up to this size, as in `ModelSettings`.
SMALL_STEM_MAX_PIXELS = 64
_LEAST_PIXELS = 32
# Far more than images have; within it no time of a step overflows.
MOST_PIXELS = 1 << 16
_MOST_CLASSES = 10_000_000
_MOST_CHANNELS = 1024


# Our other models, whose layers are counted from a trace.
TRACED = ("resnet_tiny",)


def is_network(name: str) -> bool:
    return name in RESNETS or name in ALEXNETS


def known_network(
    name: str, image_size: int, num_classes: int = 1000, stem: str = "auto", channels: int = 3
) -> Network | None:
    """As `network`; None where the model is not known, or its images are too small or of unknown size."""
    known = is_network(name) and _LEAST_PIXELS <= image_size <= MOST_PIXELS
    return network(name, image_size, num_classes, stem, channels) if known else None


def network(
    name: str, image_size: int = 224, num_classes: int = 1000, stem: str = "auto", channels: int = 3
) -> Network:
    """ConfigError where the model has no analytic form. `stem` is that of a residual net: `imagenet`,
    `small`, or `auto` (by the image size, as in training)."""
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
    if not least <= pixels <= MOST_PIXELS:
        problem = f"must be from {least} to {MOST_PIXELS:,}"
        raise ConfigError("--image-size", pixels, problem, "224 is usual")


def check_ends(classes: int, channels: int) -> None:
    """Of a model: its outputs, and the channels of its images."""
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


def _layers(
    name: str, image_size: int, num_classes: int, stem: str, image_channels: int
) -> list[Layer]:
    trace = Tracer(image_channels, image_size)
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


def _block(trace: Tracer, name: str, channels: int, stride: int, wide: bool) -> None:
    entry, stored = (trace.channels, trace.size), not trace.again
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
    trace.residual_sum(f"{name}.sum", again=stored and entry == leaving)


_FAST_CHANNELS = (64, 64, 256, 256)


def _layers_fast(image_size: int, num_classes: int, _stem: str, image_channels: int) -> list[Layer]:
    trace = Tracer(image_channels, image_size)
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
    **{name: partial(_layers, name) for name in _DEPTHS},
    "resnet_fast": _layers_fast,
}


# Number in `features`, channels, kernel, stride, padding, and whether a pool follows.
_CONVOLUTIONS = (
    (0, 64, 11, 4, 2, True),
    (3, 192, 5, 1, 2, True),
    (6, 384, 3, 1, 1, False),
    (8, 256, 3, 1, 1, False),
    (10, 256, 3, 1, 1, True),
)
_HIDDEN, _POOLED = 4096, 6


def _layers_network_alexnet(
    norms: bool, image_size: int, num_classes: int, _stem: str, image_channels: int
) -> list[Layer]:
    trace = Tracer(image_channels, image_size)
    for number, channels, kernel, stride, padding, pooled in _CONVOLUTIONS:
        trace.conv(f"features.{number}", channels, kernel, stride, padding, bias=True)
        if norms:
            trace.norm(f"features.bn{number}", before="pool" if pooled else "product")
        else:
            # ReLU in place of the convolution's output.
            trace.spread(f"features.{number + 1}", 2.0, kept=False)
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
    "alexnet": partial(_layers_network_alexnet, False),
    "alexnet_bn": partial(_layers_network_alexnet, True),
}
