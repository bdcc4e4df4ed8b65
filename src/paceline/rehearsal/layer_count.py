"""Counts the layers of any model in one traced forward pass on the meta device.

Nothing is computed, because tensors on the meta device have only shapes. For each layer, the result
contains the number of floating-point operations by torch's own formulas, the elements of
activations read and written, and the elements that autograd saves for the backward pass. The count
assumes that elementwise work on an activation is fused into the operation before it, and that
attention is one kernel.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from paceline.core.errors import ConfigError
from paceline.models.registry import create_model
from paceline.models.settings import ModelSettings
from paceline.planner.layers import INDEX_BYTES, Layer, NetTensor, Network
from paceline.precision.policy import matrix_weights

_BATCH = 2
# Functions of networks that autocast on a GPU computes in half precision, and those in fp32.
_HALF = {
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear",
    "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum",
    "multi_head_attention_forward", "scaled_dot_product_attention",
}  # fmt: skip
_FULL = {
    "layer_norm", "group_norm", "softmax", "log_softmax", "norm", "normalize", "cosine_similarity", "pow",
    "__pow__", "exp", "log", "log1p", "prod", "sum", "cumsum", "rsqrt", "reciprocal", "softplus",
}  # fmt: skip
# Words in the names of operations that are not products: each reads and writes an activation once.
_PASSES = ("norm", "pool", "softmax", "upsample", "grid_sampler")
# Prefixes of elementwise operations on two activations. They count as fused into the operation that
# computes one of the two, so only the other activation is read.
_JOINS = ("add", "mul", "sub", "div", "cat")


def count_layers(
    name: str, image_size: int = 224, num_classes: int = 1000, channels: int = 3
) -> Network:
    """Creates a model by its name and counts its layers.

    Args:
        name: The name of the model, such as `timm:convnext_tiny` or `module:factory`.
        image_size: Side of an image in pixels.
        num_classes: Number of classes.
        channels: Number of channels of an image.

    Raises:
        ConfigError: If the model cannot be created or does not run on the meta device.
    """
    model = create_model(
        ModelSettings(name=name),
        num_classes=num_classes,
        in_channels=channels,
        image_size=image_size,
    )
    return count_module(model.to("meta").train(), name, image_size, channels)


def count_trained(model: nn.Module, name: str, image_size: int, channels: int) -> Network:
    """Counts the layers of an existing model on any device, by means of a copy on the meta device.

    The model, its buffers and the state of all random generators do not change. Raises ConfigError
    if the model cannot be copied or does not run on the meta device.
    """
    drawn = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            return count_module(_on_meta(model, name), name, image_size, channels)
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])


def _on_meta(model: nn.Module, name: str) -> nn.Module:
    """Returns a copy of the model on the meta device; the copy's tensors use no memory."""
    made: dict[int, Any] = {}
    for parameter in model.parameters():
        trains = parameter.is_floating_point()
        made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), trains)
    for buffer in model.buffers():
        made[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        return copy.deepcopy(model, made).train()
    except Exception as error:  # noqa: BLE001  (a user's model raises what it likes)
        raise _uncountable(name, f"cannot be copied ({_first_line(error)})") from None


def count_module(model: nn.Module, name: str, image_size: int, channels: int = 3) -> Network:
    """Counts the layers of a model that is on the meta device; `name` is only for messages."""
    images = torch.empty(_BATCH, channels, image_size, image_size, device="meta")
    try:
        layers = _traced(model, images, half=False)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  (a user's model raises what it likes)
        problem = f"does not run on the meta device at {image_size} pixels ({_first_line(error)})"
        raise _uncountable(name, problem) from None
    halves = _half_kept(model, images)
    if len(halves) == len(layers):
        pairs = zip(layers, halves, strict=True)
        layers = tuple(replace(layer, half_kept=kept) for layer, kept in pairs)
    return Network(name, image_size, layers, traced=True)


def _half_kept(model: nn.Module, images: Tensor) -> list[float]:
    """Returns the memory that each layer saves for backward in half precision, in units of 2 bytes.

    Returns an empty list if the model does not run in the number formats that `_Formats` sets. The
    planner then assumes two bytes for each element that was counted in fp32.
    """
    weights = [weight for weight in matrix_weights(model) if weight.dtype == torch.float32]
    try:
        for weight in weights:
            weight.data = weight.data.half()
        return [layer.half_kept or 0.0 for layer in _traced(model, images, half=True)]
    except Exception:  # noqa: BLE001  (a user's model may mix formats in its own way)
        return []
    finally:
        for weight in weights:
            weight.data = weight.data.float()


def _traced(model: nn.Module, images: Tensor, *, half: bool) -> tuple[Layer, ...]:
    counter = _Counter(model)
    keeps = torch.autograd.graph.saved_tensors_hooks(counter.keep, lambda tensor: tensor)
    with keeps, counter, _Formats(half):
        model(images)
    return counter.layers(half)


class _Formats(TorchFunctionMode):
    """Intercepts torch functions to cast inputs as autocast does, and to call attention as one kernel.

    Inputs are cast only if `half` is True.
    """

    def __init__(self, half: bool) -> None:
        super().__init__()
        self._half = half

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if self._half and name in _HALF | _FULL:
            args, kwargs = _cast((args, kwargs), torch.half if name in _HALF else torch.float32)
        if name == "scaled_dot_product_attention":
            parts = [
                *args[:3],
                *(kwargs[key] for key in ("query", "key", "value") if key in kwargs),
            ]
            if len({part.shape[:-2] for part in parts}) == 1 and parts[0].dim() > 2:
                return _attention(*parts)
        return func(*args, **kwargs)


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Calls attention as one kernel, without the mask, which does not affect the count.

    Autograd saves the inputs and the output of this kernel, and the log-sum-exp of each row.
    """
    heads = query.shape[-3] if query.dim() > 3 else 1
    parts = (part.reshape(-1, heads, *part.shape[-2:]) for part in (query, key, value))
    result: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(*parts, None, True)[0]
    return result.reshape(*query.shape[:-1], value.shape[-1])


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Casts tensors in fp32 and half precision to `dtype`; leaves all other values unchanged."""

    def one(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.dtype in (torch.half, torch.float32)
        return value.to(dtype) if is_float else value

    return tree_map(one, values)


def _uncountable(name: str, problem: str) -> ConfigError:
    remedy = "profile it instead: paceline profile, then --profile"
    return ConfigError("--model", name, problem, remedy)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trained = {
            _storage(parameter): NetTensor(name, parameter.numel(), half=parameter.dim() > 1)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self._fixed = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._left = dict(self._trained)
        self._kept: set[int] = set()
        # Keeps counted storages alive, because a new storage could get the address of a freed one.
        self._alive: list[Tensor] = []
        self._found: list[dict[str, Any]] = []

    def keep(self, tensor: Tensor) -> Tensor:
        """Counts an activation when autograd saves it for the first time, and returns it.

        Indices and masks are counted separately, because half precision does not make them smaller.
        """
        place = _storage(tensor)
        if place not in self._fixed and place not in self._kept and self._found:
            self._kept.add(place)
            self._alive.append(tensor)
            size = tensor.untyped_storage().nbytes() / _BATCH
            if tensor.is_floating_point():
                self._found[-1]["kept"] += size / tensor.element_size()
                self._found[-1]["halves"] += size / 2
            else:
                self._found[-1]["indices"] += size / INDEX_BYTES
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs = dict(kwargs or {})
        out = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._alive += outputs
        if func._overloadpacket is torch.ops.aten._to_copy and _storage(inputs[0]) in self._fixed:
            self._fixed.add(_storage(outputs[0]))  # a parameter in another format
        maps = [tensor for tensor in inputs if _storage(tensor) not in self._fixed]
        written = outputs[0].numel() if outputs else 0
        flops, moved, depth = 0.0, 0.0, 0
        kind = func._overloadpacket.__name__.strip("_")
        formula: Callable[..., Any] | None = flop_registry.get(func._overloadpacket)
        if formula is not None:
            flops = float(formula(*args, **kwargs, out_val=out))
            moved = float(sum(tensor.numel() for tensor in maps) + written)
            depth = max(1, round(flops / 2 / max(1, written)))
        elif any(word in kind for word in _PASSES):
            read = max((tensor.numel() for tensor in maps), default=0)
            # A pool writes less than it reads. Other operations read and write equally much, but
            # the first output of a norm may be its statistics.
            moved = float(read + written) if "pool" in kind else 2.0 * max(read, written)
        elif any(kind.startswith(word) for word in _JOINS) and len(maps) > 1:
            moved = float(min(tensor.numel() for tensor in maps))
        tensors = [self._left.pop(p) for p in map(_storage, inputs) if p in self._left and moved]
        if moved:
            self._found.append({
                "name": f"{len(self._found)}.{kind}", "flops": flops / _BATCH,
                "moved": moved / _BATCH, "depth": depth, "tensors": tensors, "kept": 0.0,
                "halves": 0.0, "indices": 0.0,
            })  # fmt: skip
        return out

    def layers(self, half: bool) -> tuple[Layer, ...]:
        """Returns the counted layers.

        Trained tensors that no counted operation reads are assigned to the first layer.
        """
        if not self._found or not self._trained:
            raise ConfigError("--model", None, "has no layers that train", "name another model")
        self._found[0]["tensors"] += list(self._left.values())
        return tuple(
            Layer(
                one["name"], one["flops"], one["moved"], tuple(one["tensors"]), one["depth"],
                math.ceil(one["kept"]), indices=one["indices"], half_kept=one["halves"] if half else None,
            )
            for one in self._found
        )  # fmt: skip


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
