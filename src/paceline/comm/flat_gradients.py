"""Flat gradients: where each parameter's gradient lies in the flat buffers.

In: parameters, in the order in which their gradients shall lie. Out: a layout for each number format, and
strides for views that autograd's own gradients fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.core.errors import RunError
from paceline.core.flat_layout import FlatLayout, TensorSpec


def tensor_spec(name: str, parameter: Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))


def flat_layouts(tensors: Sequence[tuple[str, nn.Parameter]]) -> dict[str, FlatLayout]:
    """One layout for each number format; float32 always, because the signals travel in it."""
    by_dtype: dict[str, list[TensorSpec]] = {"float32": []}
    for name, parameter in tensors:
        spec = tensor_spec(name, parameter)
        by_dtype.setdefault(spec.dtype, []).append(spec)
    return {dtype: FlatLayout.build(specs) for dtype, specs in by_dtype.items()}


def dense(name: str, gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    if gradient.layout != torch.strided:
        raise RunError(
            f"the gradient of {name} is sparse", "make it dense, as with nn.Embedding(sparse=False)"
        )
    return gradient


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's own strides, so that channels_last weights get channels_last gradients."""
    return torch.empty_like(parameter, memory_format=torch.preserve_format).stride()
