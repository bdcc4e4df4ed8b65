"""Networks without the framework: what each layer does to one image.

`network` gives, for a model's name and an image size, each layer's multiply-adds, the activations that
it reads, writes and keeps for the backward pass, and its trained tensors under the names that the model
itself gives them. `paceline.plan.workload` makes the times of a step of it. A model that is not here is
counted from a trace (`paceline.train.layer_count`).

`step_memory` counts what a step keeps in the memory of one GPU, by purpose, at the moment of the backward
pass that needs most: weights in the format of training, fp32 masters and momentum, the exchange's flat
gradients and those that backward has made so far, the activations that are still kept, the gradients of
the maps at hand, the images on the device, buffers of the matrix library and what the CUDA graph has of
its own. It is a count, not a fit. `memory_on` takes from the catalog which of them a chip has, and
whether our fused kernels run there, which keep less. How far it is from measured peaks is in
docs/planner.md, Accuracy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

from paceline.core.errors import ConfigError, nearest
from paceline.plan.cluster import Accelerator

# A place of a maximum as torch keeps it; our fused kernels keep a byte.
INDEX_BYTES = 8


@dataclass(frozen=True)
class NetTensor:
    """A trained tensor. Biases and what belongs to normalisation stay fp32 in half precision."""

    name: str
    elements: int
    half: bool


@dataclass(frozen=True)
class Layer:
    """`flops` counts a multiply-add as two, `moved` the elements read and written, both for one image
    in the forward pass. `depth` is the length of the sums of a matrix product (input channels times
    kernel area), 0 for other layers. For the backward pass stay `kept` elements, `unfused` ones more
    where our fused kernels do not run, and the places of the maxima of a pool, `indices`."""

    name: str
    flops: float
    moved: float
    tensors: tuple[NetTensor, ...] = ()
    depth: int = 0
    kept: float = 0.0
    unfused: float = 0.0
    indices: float = 0.0

    def kept_bytes(self, width: int, fused: bool) -> float:
        """Of one image, with elements of `width` bytes."""
        if fused:
            return width * self.kept + self.indices
        return width * (self.kept + self.unfused) + INDEX_BYTES * self.indices


@dataclass(frozen=True)
class Network:
    """Layers in the order of the forward pass; `traced` where they were counted from a trace."""

    name: str
    image_size: int
    layers: tuple[Layer, ...]
    traced: bool = False

    @property
    def tensors(self) -> tuple[NetTensor, ...]:
        return tuple(tensor for layer in self.layers for tensor in layer.tensors)

    @property
    def has_fused_form(self) -> bool:
        """Whether training has fused kernels for it; other models keep what torch's operators keep."""
        return not self.traced and self.name != "alexnet"

    @property
    def pads_images(self) -> bool:
        """Whether the fused form takes images with a fourth channel."""
        return self.has_fused_form and self.name in RESNETS

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
        bias: bool = False,
    ) -> None:  # fmt: skip
        padding = kernel // 2 if padding is None else padding
        read = self.map_elements
        size = self._shrunk(kernel, stride, padding)
        depth = self.channels * kernel**2
        weights = out * depth
        self.channels, self.size = out, size
        flops = 2.0 * weights * size**2
        tensors = [NetTensor(f"{name}.weight", weights, half=True)]
        tensors += [NetTensor(f"{name}.bias", out, half=False)] if bias else []
        moved, kept = read + self.map_elements, self.map_elements
        self.layers.append(Layer(name, flops, moved, tuple(tensors), depth, kept))

    def norm(self, name: str, before: str = "product") -> None:
        """The product before it gives the statistics, the norm reads and writes the map. Its output is
        kept before a `product`, not before a `sum`, and before a `pool` not by our fused kernels."""
        tensors = tuple(
            NetTensor(f"{name}.{part}", self.channels, half=False) for part in ("weight", "bias")
        )
        size = self.map_elements
        kept = size if before == "product" else 0.0
        unfused = size if before == "pool" else 0.0
        self.layers.append(Layer(name, 4 * size, 2 * size, tensors, kept=kept, unfused=unfused))

    def pool(self, name: str, kernel: int, stride: int, padding: int) -> None:
        read = self.map_elements
        self.size = self._shrunk(kernel, stride, padding)
        size = self.map_elements
        self.layers.append(Layer(name, 0.0, read + size, kept=size, indices=size))

    def _shrunk(self, kernel: int, stride: int, padding: int) -> int:
        size = (self.size + 2 * padding - kernel) // stride + 1
        if size < 1:
            raise ConfigError("--image-size", None, "too small for this model", "224 is usual")
        return size

    def spread(self, name: str, times: float, kept: bool = True) -> None:
        """Elementwise work over the whole map, whose result is kept unless it takes the map's place."""
        size = self.map_elements
        self.layers.append(Layer(name, 0.0, times * size, kept=size if kept else 0.0))

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


Build = Callable[[int, int, str], list[Layer]]
# Residual nets have the small stem (3 × 3, no pool) for images up to this size, as in `ModelSettings`.
SMALL_STEM_MAX_PIXELS = 64
_LEAST_PIXELS = 32
# Far more than images have; within it no time of a step overflows.
MOST_PIXELS = 1 << 16


def is_network(name: str) -> bool:
    return name in RESNETS or name in ALEXNETS


def known_network(
    name: str, image_size: int, num_classes: int = 1000, stem: str = "auto"
) -> Network | None:
    """As `network`; None where the model is not known, or its images are too small or of unknown size."""
    known = is_network(name) and _LEAST_PIXELS <= image_size <= MOST_PIXELS
    return network(name, image_size, num_classes, stem) if known else None


def network(
    name: str, image_size: int = 224, num_classes: int = 1000, stem: str = "auto"
) -> Network:
    """ConfigError where the model has no analytic form. `stem` is that of a residual net: `imagenet`,
    `small`, or `auto` (by the image size, as in training)."""
    if stem == "auto":
        stem = "small" if image_size <= SMALL_STEM_MAX_PIXELS else "imagenet"
    known: dict[str, Build] = {**RESNETS, **ALEXNETS}
    if name not in known:
        remedy = nearest(name, tuple(known)) or "give timm:NAME or module:factory, or --profile"
        raise ConfigError("--model", name, "unknown to the planner", remedy)
    check_image_size(image_size, _LEAST_PIXELS)
    return Network(name, image_size, tuple(known[name](image_size, num_classes, stem)))


def check_image_size(pixels: int, least: int = 1) -> None:
    if not least <= pixels <= MOST_PIXELS:
        problem = f"must be from {least} to {MOST_PIXELS:,}"
        raise ConfigError("--image-size", pixels, problem, "224 is usual")


_DEPTHS = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
_WIDE = ("resnet50", "resnet101", "resnet152")


def _layers(name: str, image_size: int, num_classes: int, stem: str) -> list[Layer]:
    trace = Tracer(3, image_size)
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
    entry = trace.channels, trace.size
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
    # Fused with the norm before it: one map more is read.
    trace.spread(f"{name}.sum", 1.0)


_FAST_CHANNELS = (64, 64, 256, 256)


def _layers_fast(image_size: int, num_classes: int, _stem: str) -> list[Layer]:
    trace = Tracer(3, image_size)
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
    norms: bool, image_size: int, num_classes: int, _stem: str
) -> list[Layer]:
    trace = Tracer(3, image_size)
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


# Memory of a step.

_CHANNELS = 3
# Of normalized images for fused residual nets: a channel of zeros, because GPUs convolve four faster.
_PADDED_CHANNELS = 4
# Batches of uint8 images on the device: the one in use and those that are prefetched.
_RESIDENT_BATCHES = 4
# fp32: on an H200, ResNet-50 at batch 256 took 1.32 times the activations that its layers keep, with both
# strict fp32 and TF32 products; the rest is workspace of convolutions.
_FULL_WORKSPACE = 1.32
# torch gives cuBLAS a buffer for each thread and stream (32 MiB on Hopper, 8 MiB before): forward and
# backward have a thread each, and a CUDA graph is captured on a stream of its own.
_LIBRARY_BYTES = 2.0 * 2**25
# Of the memory that the maker states: context and libraries' buffers take about 2 GB, and an allocator
# cannot fill the rest to the last byte.
_USABLE = 0.95
_CONTEXT_BYTES = 2e9
LARGEST_BATCH = 1 << 20


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU at the peak of a step."""

    weights: float
    gradients: float
    masters: float
    momentum: float
    activations: float
    images: float
    libraries: float
    graph: float

    @property
    def total(self) -> float:
        return float(sum(asdict(self).values()))


def step_memory(
    net: Network, batch: int, half: bool = True, graphs: bool = True, fused: bool = True,
    on_gpu: bool = True,
) -> MemoryEstimate:  # fmt: skip
    """`half`: fp16 or bf16 with fp32 masters; otherwise fp32, whose weights are the masters. `fused`: our
    fused kernels run, where the model has them. A CPU has neither graphs nor buffers of cuBLAS."""
    width = 2 if half else 4
    pixels = batch * net.image_size**2
    fused = fused and net.has_fused_form
    channels = _PADDED_CHANNELS if fused and net.pads_images else _CHANNELS
    activations, made = _backward_peak(net, batch, half, fused)
    flat = net.elements * width
    return MemoryEstimate(
        weights=float(net.elements * width),
        gradients=flat + made,
        masters=4.0 * net.elements if half else 0.0,
        momentum=4.0 * net.elements,
        activations=activations,
        images=float(pixels * (_RESIDENT_BATCHES * _CHANNELS + channels * width)),
        libraries=_LIBRARY_BYTES if on_gpu else 0.0,
        # The graph reads a copy of the batch.
        graph=_LIBRARY_BYTES + pixels * _CHANNELS if graphs and on_gpu else 0.0,
    )


def memory_on(
    gpu: Accelerator, net: Network, batch: int, half: bool | None = None, fused: bool = True
) -> MemoryEstimate:
    """Of a step on this chip: `half` is as usual there by default, and `fused` only where Triton runs."""
    half = gpu.in_half if half is None else half
    return step_memory(net, batch, half, fused=fused and gpu.runs_triton, on_gpu=gpu.is_gpu)


def _backward_peak(net: Network, batch: int, half: bool, fused: bool) -> tuple[float, float]:
    """Bytes of activations and of parameters' gradients where both together are most. Backward frees what
    a layer has kept and makes its gradients, which are gathered into the flat ones when all are there;
    meanwhile the gradients of the layer's input and output exist."""
    width, workspace = (2, 1.0) if half else (4, _FULL_WORKSPACE)
    kept = sum(layer.kept_bytes(width, fused) for layer in net.layers)
    made, most = 0.0, (0.0, 0.0)
    for layer in reversed(net.layers):
        made += sum(t.elements * (width if t.half else 4) for t in layer.tensors)
        here = batch * (workspace * kept + width * layer.moved)
        most = max(most, (here, made), key=sum)
        kept -= layer.kept_bytes(width, fused)
    return most


def usable_bytes(gpu: Accelerator) -> float:
    return _USABLE * gpu.memory_bytes - _CONTEXT_BYTES


def largest_batch(
    net: Network, gpu: Accelerator, half: bool | None = None, fused: bool = True
) -> int:
    """0 where not even one image fits; `half` and `fused` as in `memory_on`."""
    room = usable_bytes(gpu)
    low, high = 0, LARGEST_BATCH
    while low < high:
        middle = (low + high + 1) // 2
        if memory_on(gpu, net, middle, half, fused).total <= room:
            low = middle
        else:
            high = middle - 1
    return low


def check_memory(
    net: Network, gpu: Accelerator, batch: int, half: bool | None = None, fused: bool = True
) -> MemoryEstimate:
    """ConfigError, with the largest batch that fits, for one that does not; arguments as `memory_on`."""
    needed = memory_on(gpu, net, batch, half, fused)
    if needed.total > usable_bytes(gpu):
        most = largest_batch(net, gpu, half, fused)
        remedy = f"at most {most:,} fit" if most else "choose a GPU with more memory"
        raise ConfigError(
            "--batch-size", batch,
            f"{net.name} needs {needed.total / 1e9:,.0f} GB on one GPU; {gpu.name} has "
            f"{gpu.memory_bytes / 1e9:,.0f} GB, of which {usable_bytes(gpu) / 1e9:,.0f} are usable",
            remedy,
        )  # fmt: skip
    return needed
