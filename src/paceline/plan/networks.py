"""Networks without the framework, and their steps on hardware that is not here.

`network` gives, for a model's name and an image size, each layer's multiply-adds of one image, the
activations that it reads and writes, and its trained tensors under the names that the model itself gives
them. `analytic_workload` makes a `Workload` of it by the roofline: a layer takes as long as the slower of
its products and its memory traffic, twice that in the backward pass, and a latency that no batch hides.
One measured training of ResNet-50 on the accelerator says how far from its peaks a real step stays; other
networks are taken to stay as far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from paceline.core.errors import ConfigError, nearest
from paceline.plan.cluster import Accelerator, Measured, accelerator
from paceline.plan.prediction import slowest_of
from paceline.plan.workload import Affine, Gradient, Workload


@dataclass(frozen=True)
class NetTensor:
    """A trained tensor. Biases and what belongs to normalisation stay fp32 in half precision."""

    name: str
    elements: int
    half: bool


@dataclass(frozen=True)
class Layer:
    """`flops` counts a multiply-add as two, `moved` the elements read and written, both for one image
    in the forward pass."""

    name: str
    flops: float
    moved: float
    tensors: tuple[NetTensor, ...] = ()


@dataclass(frozen=True)
class Network:
    """Layers in the order of the forward pass."""

    name: str
    image_size: int
    layers: tuple[Layer, ...]

    @property
    def tensors(self) -> tuple[NetTensor, ...]:
        return tuple(tensor for layer in self.layers for tensor in layer.tensors)

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

    @property
    def map_elements(self) -> float:
        return self.channels * self.size**2

    def conv(
        self, name: str, out: int, kernel: int, stride: int = 1, padding: int | None = None,
        groups: int = 1, bias: bool = False,
    ) -> None:  # fmt: skip
        padding = kernel // 2 if padding is None else padding
        read = self.map_elements
        size = self._shrunk(kernel, stride, padding)
        weights = out * (self.channels // groups) * kernel**2
        self.channels, self.size = out, size
        flops = 2.0 * weights * size**2
        tensors = [NetTensor(f"{name}.weight", weights, half=True)]
        tensors += [NetTensor(f"{name}.bias", out, half=False)] if bias else []
        self.layers.append(Layer(name, flops, read + self.map_elements, tuple(tensors)))

    def norm(self, name: str, passes: float = 3.0) -> None:
        """Statistics read the map, the norm reads and writes it."""
        tensors = tuple(
            NetTensor(f"{name}.{part}", self.channels, half=False) for part in ("weight", "bias")
        )
        self.layers.append(Layer(name, 4 * self.map_elements, passes * self.map_elements, tensors))

    def pool(self, name: str, kernel: int, stride: int, padding: int) -> None:
        read = self.map_elements
        self.size = self._shrunk(kernel, stride, padding)
        self.layers.append(Layer(name, 0.0, read + self.map_elements))

    def _shrunk(self, kernel: int, stride: int, padding: int) -> int:
        size = (self.size + 2 * padding - kernel) // stride + 1
        if size < 1:
            raise ConfigError("--image-size", None, "too small for this model", "224 is usual")
        return size

    def spread(self, name: str, times: float) -> None:
        """Elementwise work over the whole map."""
        self.layers.append(Layer(name, 0.0, times * self.map_elements))

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
        self.layers.append(Layer(name, 2.0 * features * out, features + out, tensors))


Build = Callable[[int, int], list[Layer]]


def network(name: str, image_size: int = 224, num_classes: int = 1000) -> Network:
    """ConfigError where the model has no analytic form."""

    known: dict[str, Build] = {**RESNETS, **ALEXNETS}
    if name not in known:
        raise ConfigError("--model", name, "unknown to the planner", nearest(name, tuple(known)))
    if image_size < 32:
        raise ConfigError("--image-size", image_size, "must be at least 32", "224 is usual")
    return Network(name, image_size, tuple(known[name](image_size, num_classes)))


_DEPTHS = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
_WIDE = ("resnet50", "resnet101", "resnet152")


def _layers(name: str, image_size: int, num_classes: int) -> list[Layer]:
    trace = Tracer(3, image_size)
    trace.conv("conv1", 64, 7, 2, 3)
    trace.norm("bn1")
    trace.pool("maxpool", 3, 2, 1)
    for number, depth in enumerate(_DEPTHS[name]):
        for block in range(depth):
            stride = 2 if number > 0 and block == 0 else 1
            _block(trace, f"layer{number + 1}.{block}", 64 << number, stride, name in _WIDE)
    trace.average("avgpool")
    trace.linear("fc", num_classes)
    return trace.layers


def _block(trace: Tracer, name: str, channels: int, stride: int, wide: bool) -> None:
    entry = trace.channels, trace.size
    kernels = ((1, 1), (3, stride), (1, 1)) if wide else ((3, stride), (3, 1))
    for number, (kernel, step) in enumerate(kernels, 1):
        out = channels * 4 if wide and number == 3 else channels
        trace.conv(f"{name}.conv{number}", out, kernel, step)
        trace.norm(f"{name}.bn{number}")
    leaving = trace.channels, trace.size
    if entry != leaving:
        trace.channels, trace.size = entry
        trace.conv(f"{name}.downsample.0", leaving[0], 1, stride, 0)
        trace.norm(f"{name}.downsample.1")
    trace.channels, trace.size = leaving
    trace.spread(f"{name}.sum", 3.0)


RESNETS: dict[str, Build] = {name: partial(_layers, name) for name in _DEPTHS}


# Number in `features`, channels, kernel, stride, padding, and whether a pool follows.
_CONVOLUTIONS = (
    (0, 64, 11, 4, 2, True),
    (3, 192, 5, 1, 2, True),
    (6, 384, 3, 1, 1, False),
    (8, 256, 3, 1, 1, False),
    (10, 256, 3, 1, 1, True),
)
_HIDDEN, _POOLED = 4096, 6


def _layers_network_alexnet(norms: bool, image_size: int, num_classes: int) -> list[Layer]:
    trace = Tracer(3, image_size)
    for number, channels, kernel, stride, padding, pooled in _CONVOLUTIONS:
        trace.conv(f"features.{number}", channels, kernel, stride, padding, bias=True)
        if norms:
            trace.norm(f"features.bn{number}")
        else:
            trace.spread(f"features.{number + 1}", 2.0)
        if pooled:
            trace.pool(f"features.{number + 2}", 3, 2, 0)
    if norms:
        trace.norm("features.bn_pool5")
    trace.average("avgpool", _POOLED)
    trace.linear("classifier.1", _HIDDEN)
    trace.linear("classifier.4", _HIDDEN)
    trace.linear("classifier.6", num_classes)
    return trace.layers


ALEXNETS: dict[str, Build] = {
    "alexnet": partial(_layers_network_alexnet, False),
    "alexnet_bn": partial(_layers_network_alexnet, True),
}


# ResNet-50 on one H200, batches 64 to 512 (three recipes, one intercept): 4.42 ms of a step
# do not shrink with the batch. Divided by the layers of the planner's ResNet-50, and taken to be the same
# on every GPU: it is launches, latencies and part-filled waves, not arithmetic.
FIXED_STEP_S = 4.42e-3
_HALF_BYTES = 2
# Per weight: half gradient, fp32 master and momentum read and written, half weight written.
_UPDATE_BYTES = 20
# A share of the peaks, where nothing was measured on the chip or a sister.
_USUAL_SHARE = 0.4
# Standard errors of the times: measured on the chip, on a sister, or from peaks alone.
_SPREAD = {"measured": 0.05, "like": 0.10, "peaks": 0.30}


def analytic_workload(net: Network, gpu: Accelerator) -> Workload:
    """Compute only: input is taken to keep up."""
    fixed = FIXED_STEP_S / len(network("resnet50").layers)
    scale, basis = _scale(gpu, fixed)
    forward = [scale * _roofline(layer, gpu) for layer in net.layers]
    # The first layer's input needs no gradient.
    backward = [t * (2 if number else 1) for number, t in enumerate(forward)]
    per_image, total = list(reversed(backward)), sum(backward)
    gradients, done = [], 0.0
    for layer, seconds in zip(reversed(net.layers), per_image, strict=True):
        done += seconds
        for tensor in reversed(layer.tensors):
            share = min(1.0, done / total)
            gradients.append(Gradient(tensor.name, tensor.elements, tensor.half, share))
    latency = fixed * len(net.layers)
    return Workload(
        model=net.name,
        gradients=tuple(gradients),
        forward=Affine(latency / 3, sum(forward)),
        backward=Affine(latency * 2 / 3, total),
        update_s=_update_s(net, gpu),
        spread=_SPREAD[basis],
        source=f"roofline of {gpu.name}, {_words(gpu, basis)}",
    )


def _roofline(layer: Layer, gpu: Accelerator) -> float:
    """Seconds for one image, forward."""
    return max(layer.flops / gpu.flops_per_s, layer.moved * _HALF_BYTES / gpu.memory_bytes_per_s)


def _update_s(net: Network, gpu: Accelerator) -> float:
    return net.elements * _UPDATE_BYTES / gpu.memory_bytes_per_s


def _scale(gpu: Accelerator, fixed: float) -> tuple[float, str]:
    """How many times as long as the roofline a real step takes."""
    if gpu.measured is not None:
        return _measured_scale(gpu, gpu.measured, fixed), "measured"
    if gpu.like:
        sister = accelerator(gpu.like)
        if sister.measured is None:
            raise ConfigError("accelerators.toml", gpu.like, "has no measured training")
        return _measured_scale(sister, sister.measured, fixed), "like"
    return 1 / _USUAL_SHARE, "peaks"


def _measured_scale(gpu: Accelerator, seen: Measured, fixed: float) -> float:
    net = network("resnet50")
    roofline = [_roofline(layer, gpu) for layer in net.layers]
    per_image = 3 * sum(roofline) - roofline[0]
    # The step was as long as that of the slowest rank.
    step = seen.batch / seen.images_per_s / slowest_of(seen.ranks)
    return (step - fixed * len(net.layers) - _update_s(net, gpu)) / (seen.batch * per_image)


def _words(gpu: Accelerator, basis: str) -> str:
    if basis == "measured" and gpu.measured is not None:
        return f"scaled to {gpu.measured.images_per_s:,.0f} images/s ({gpu.measured.source})"
    if basis == "like":
        return f"scaled as {gpu.like}"
    return f"at {_USUAL_SHARE:.0%} of its peaks: profile it for a better answer"
