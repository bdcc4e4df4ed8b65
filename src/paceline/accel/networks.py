"""Finds the layers of a model that have faster implementations.

`network_of` divides a model into parts: convolutions with norms, and residual blocks. It supports
Paceline's residual nets, AlexNet with norms, and residual nets whose modules are named like those
of torchvision or timm. For the latter, a pass over random images must confirm that the parts
compute the same output as the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.models.alexnet import CONVOLUTIONS, AlexNet
from paceline.models.registry import is_own
from paceline.models.resnet import FastResNet, PooledConv, ResNet, SmallResNet

# The side of images in pixels, and the batch, of the pass that confirms the structure of a model.
_SIDE, _IMAGES = 64, 2

# A convolution and its norm. Synchronized norms are not a `BatchNorm2d`, but have the same
# attributes.
Pair = tuple[nn.Module, nn.BatchNorm2d]


@dataclass(frozen=True)
class ConvNorm:
    """A convolution with norm, ReLU and an optional pool.

    Kernels can fuse them only if `fusible` is True.
    """

    convolution: nn.Module
    norm: nn.BatchNorm2d
    pool: nn.MaxPool2d | None = None
    fusible: bool = True

    def pairs(self) -> Iterator[Pair]:
        yield self.convolution, self.norm


@dataclass(frozen=True)
class Block:
    """A residual block: the convolutions and norms of its branch and, if any, of its shortcut.

    A ReLU follows each norm of the branch, except the last one, and the sum of branch and shortcut.
    """

    module: nn.Module
    branch: tuple[Pair, ...]
    downsample: Pair | None = None

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        return self.branch[-1][1]

    def pairs(self) -> Iterator[Pair]:
        yield from self.branch
        if self.downsample is not None:
            yield self.downsample


@dataclass(frozen=True)
class Network:
    """The layers of a model in order: `parts`, an optional final `norm`, and the `head`."""

    parts: tuple[ConvNorm | Block, ...]
    head: Callable[[Tensor], Tensor]
    norm: nn.BatchNorm2d | None = None

    @property
    def first(self) -> nn.Module | None:
        """The convolution that reads the images; None if it cannot be fused."""
        part = self.parts[0]
        return part.convolution if isinstance(part, ConvNorm) and part.fusible else None

    def blocks(self) -> list[Block]:
        return [part for part in self.parts if isinstance(part, Block)]

    def can_fuse(self) -> bool:
        """Returns True if all norms are batch norms without synchronized statistics."""
        return all(isinstance(n, nn.BatchNorm2d) for part in self.parts for _, n in part.pairs())


def network_of(model: nn.Module) -> Network | None:
    """Returns the layers of a model, which it does not change, or None if the structure is unknown."""
    if type(model) is AlexNet:
        return _alexnet(model)
    try:
        network = _residual(model)
    except _UnknownLayerError:
        return None
    return network if type(model) in _OWN or _confirmed(model, network) else None


_OWN = (ResNet, FastResNet, SmallResNet)


class _UnknownLayerError(Exception):
    """Raised if a module does not fit into the structure of a residual net."""


def _alexnet(model: AlexNet) -> Network | None:
    layers = dict(model.features.named_children())
    parts = []
    for number in CONVOLUTIONS:
        norm, pool = layers.get(f"bn{number}"), layers.get(str(number + 2))
        if not _is_norm(norm):
            return None
        pool = pool if isinstance(pool, nn.MaxPool2d) else None
        parts.append(ConvNorm(layers[str(number)], norm, pool))
    last = layers.get("bn_pool5")
    return Network(tuple(parts), model.head, last if _is_norm(last) else None)


def _residual(model: nn.Module) -> Network:
    """Returns the layers of a residual net: conv1, bn1, ReLU, maxpool, layer1, layer2, … and a head.

    `maxpool` is optional. Raises `_UnknownLayerError` for any other structure.
    """
    children = _children(model)
    stages = [children.pop(name) for name in list(children) if name.startswith("layer")]
    pool = children.pop("maxpool", None)
    if not stages or not isinstance(pool, nn.MaxPool2d | None):
        raise _UnknownLayerError
    if pool is not None and (pool.kernel_size, pool.stride, pool.padding) != (3, 2, 1):
        raise _UnknownLayerError
    stem = ConvNorm(*_pair(children, "1"), pool, fusible=type(model) is not SmallResNet)
    head = _head(model, children)
    inner = [part for stage in stages for part in stage.children()]
    return Network((stem, *map(part_of, inner)), head)


def _is_norm(module: nn.Module | None) -> TypeGuard[nn.BatchNorm2d]:
    """Returns True for torch's and Paceline's batch norms, but not for users' classes."""
    own = isinstance(module, _BatchNorm) and type(module).__module__.startswith("paceline.")
    return own or type(module) is nn.BatchNorm2d


def _children(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the child modules by name, without ReLUs and identities."""
    return {
        name: child
        for name, child in module.named_children()
        if type(child) not in (nn.ReLU, nn.Identity)
    }


def _pair(children: dict[str, nn.Module], number: str) -> Pair:
    convolution, norm = children.pop(f"conv{number}", None), children.pop(f"bn{number}", None)
    if convolution is None or not _is_norm(norm):
        raise _UnknownLayerError
    return convolution, norm


def part_of(module: nn.Module) -> ConvNorm | Block:
    """Returns the layers of a residual block or `PooledConv`.

    Raises `_UnknownLayerError` for any other module.
    """
    children = _children(module)
    if type(module) is PooledConv:
        return ConvNorm(*_pair(children, ""), module.maxpool)
    shortcut = children.pop("downsample", None)
    branch = tuple(_pair(children, str(number + 1)) for number in range(len(children) // 2))
    if len(branch) not in (2, 3) or children:
        raise _UnknownLayerError
    if shortcut is None:
        return Block(module, branch)
    layers = [child for child in shortcut.children() if type(child) is not nn.Identity]
    if len(layers) != 2:
        raise _UnknownLayerError
    return Block(module, branch, _pair({"conv": layers[0], "bn": layers[1]}, ""))


def _head(model: nn.Module, children: dict[str, nn.Module]) -> Callable[[Tensor], Tensor]:
    """Returns a function that computes the logits with the classifier of the model."""
    for name in ("head", "forward_head"):
        if (name == "forward_head" or is_own(model)) and callable(getattr(model, name, None)):
            head: Callable[[Tensor], Tensor] = getattr(model, name)
            return head
    if children.keys() != {"avgpool", "fc"}:
        raise _UnknownLayerError
    pool, linear = children["avgpool"], children["fc"]
    return lambda maps: linear(pool(maps).flatten(1))


def _confirmed(model: nn.Module, network: Network) -> bool:
    """Returns True if `network` computes the same output as the model for random images.

    Noise is added to the weights for this comparison, because zeros in γ would hide differences.
    The model, its training mode and the random generators do not change.
    """
    from paceline.accel.forward import Forward

    first = network.first
    if not isinstance(first, nn.Conv2d) or first.weight.is_meta:
        return False
    both = _Both(model, Forward(network))
    device = first.weight.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(0)
        values = {
            name: value.float() + 0.1 * torch.rand_like(value, dtype=torch.float32)
            if value.is_floating_point()
            else value.clone()
            for name, value in both.state_dict().items()
        }
        channels = first.in_channels * first.groups
        images = torch.randn(_IMAGES, channels, _SIDE, _SIDE, device=device)
        try:
            torch.manual_seed(1)
            wanted = torch.func.functional_call(both, values, (images, True), strict=True)
            torch.manual_seed(1)
            computed = torch.func.functional_call(both, values, (images, False), strict=True)
        except Exception:  # noqa: BLE001  (a user's code; the first step reports what is wrong with it)
            return False
    return (
        isinstance(wanted, Tensor)
        and wanted.shape == computed.shape
        and bool((wanted - computed).norm() <= 1e-3 * wanted.norm())
    )


class _Both(nn.Module):
    """Calls either a model or its `Network`, so that `functional_call` sets the weights of both."""

    def __init__(self, model: nn.Module, parts: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self._parts = model, parts
        self.training = model.training

    def forward(self, images: Tensor, whole: bool) -> Tensor:
        out: Tensor = self.model(images) if whole else self._parts(images)
        return out
