"""`Network`: what a model computes and moves, layer by layer, without the framework.

In: a model's name and the image size. Out: for each layer the multiply-adds of one image, the activations
that it reads and writes, and its trained tensors under the names that the model itself gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.errors import ConfigError, nearest


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
    from paceline.plan.network_alexnet import ALEXNETS
    from paceline.plan.network_resnet import RESNETS

    known: dict[str, Build] = {**RESNETS, **ALEXNETS}
    if name not in known:
        raise ConfigError("--model", name, "unknown to the planner", nearest(name, tuple(known)))
    if image_size < 32:
        raise ConfigError("--image-size", image_size, "must be at least 32", "224 is usual")
    return Network(name, image_size, tuple(known[name](image_size, num_classes)))
