"""Convolutions of fused blocks as kernels of cuDNN, in fp16 on a GPU.

Forward, a kernel computes relu(norm(x)), relu(norm(x) + residual) or relu(norm(x) + norm(residual)) while
it loads, and sums the statistics of the next norm. Backward, the gradient of an input goes through sum
and ReLU, and the kernel sums the gradients of γ and β; that of a weight computes relu(norm(x)) again.
cuDNN reads scale and shift of a norm in fp16, and sums about 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from paceline.models.cudnn_graphs import ALIGNMENT, Graph, Plan, Value, plans
from paceline.models.fused import Moments
from paceline.models.operands import (
    JOINED,
    MERGED,
    NORMALIZED,
    PLAIN,
    PROJECTED,
    Dims,
    Epilogue,
    NormedMap,
    Operand,
    out_dims,
)

# Of cuDNN's heuristics, best guess first.
_MOST_PLANS = 6
_FACTORS = ("dgamma", "dbeta", "a", "b", "c")


def can_run(x: Tensor, weight: Tensor) -> bool:
    """Whether cuDNN may have kernels for the two."""
    channels = weight.shape[0] | weight.shape[1]
    return (
        x.is_cuda
        and x.dtype == weight.dtype == torch.float16
        and channels % 8 == 0
        and weight.is_contiguous(memory_format=torch.channels_last)
        and weight.data_ptr() % ALIGNMENT == 0  # may lie anywhere in a flat buffer
    )


def _new_map(dims: Dims, like: Tensor) -> Tensor:
    return torch.empty(
        dims, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


# Forward


def forward(
    operand: Operand, weight: Tensor, stride: int, keep: bool
) -> dict[str, Callable[[], tuple[Tensor, Moments, Tensor | None]]]:
    """The forms of `products.forward_product`."""
    if not can_run(operand.x, weight):
        return {}
    shapes = (tuple(operand.x.shape), tuple(weight.shape), stride, operand.x.device)
    found: dict[str, Callable[[], tuple[Tensor, Moments, Tensor | None]]] = {
        f"cudnn statistics {name}": partial(_forward, plan, operand, weight, stride, False, True)
        for name, plan in _forward_plans(*shapes, PLAIN, False).items()
    }
    if operand.form != PLAIN:
        keep = keep or operand.form != NORMALIZED  # cuDNN has no other form of a block's output
        for name, plan in _forward_plans(*shapes, operand.form, keep).items():
            found[f"cudnn {name}"] = partial(_forward, plan, operand, weight, stride, True, keep)
    return found


@functools.cache
def _forward_plans(
    x: Dims, weight: Dims, stride: int, device: torch.device, form: int, keep: bool
) -> dict[str, Plan]:
    return plans(forward_graph(x, weight, stride, form, keep), device, _MOST_PLANS)


def forward_graph(x: Dims, weight: Dims, stride: int, form: int, keep: bool) -> Graph:
    graph, into = Graph(), x[1]
    maps = graph.map("x", x)
    if form != PLAIN:
        maps = _affine(graph, maps, into, "")
        if form == JOINED:
            maps = graph.pointwise("add", maps, graph.map("residual", x))
        elif form == PROJECTED:
            other = _affine(graph, graph.map("residual", x), into, "residual_")
            maps = graph.pointwise("add", maps, other)
        maps = graph.pointwise("relu", maps, name="kept" if keep else "")
    out = graph.map("out", out_dims(x, weight, stride))
    graph.convolution("forward", maps, graph.map("weight", weight), out, stride)
    sums = (graph.vector(name, weight[0]) for name in ("sum", "squares"))
    graph.statistics(out, *sums)
    return graph


def _affine(graph: Graph, x: Value, channels: int, tag: str) -> Value:
    scaled = graph.pointwise("mul", x, graph.vector(f"{tag}scale", channels, half=True))
    return graph.pointwise("add", scaled, graph.vector(f"{tag}shift", channels, half=True))


def _affine_tensors(saved: Tensor, tag: str) -> dict[str, Tensor]:
    scale, shift = saved[4].view(torch.float16).chunk(2)
    return {f"{tag}scale": scale, f"{tag}shift": shift}


def _forward(
    plan: Plan, operand: Operand, weight: Tensor, stride: int, fused: bool, keep: bool
) -> tuple[Tensor, Moments, Tensor | None]:
    x = operand.x if fused else operand.stored()
    out = _new_map(out_dims(tuple(x.shape), tuple(weight.shape), stride), x)
    sums = x.new_empty((2, 1, len(weight)), dtype=torch.float32)
    tensors = {"x": x, "weight": weight, "out": out, "sum": sums[0, 0], "squares": sums[1, 0]}
    kept = x
    if fused:
        assert operand.saved is not None
        tensors |= _affine_tensors(operand.saved, "")
        if operand.other is not None:
            tensors["residual"] = operand.other
        if operand.form == PROJECTED:
            assert operand.found is not None
            tensors |= _affine_tensors(operand.found, "residual_")
        if keep:
            kept = tensors["kept"] = torch.empty_like(x)
    plan.run(tensors)
    rows = out.numel() // out.shape[1]
    return out, Moments(sums, rows, centred=False), kept if keep else None


# Backward


def has_input_gradient(gradient: Operand, weight: Tensor, end: Epilogue, stride: int) -> bool:
    """Whether `input_gradient` has forms."""
    return end.form != PLAIN and bool(_input_plans_of(gradient.x, weight, end, stride))


def _input_plans_of(
    gradient: Tensor, weight: Tensor, end: Epilogue, stride: int
) -> dict[str, Plan]:
    if not can_run(gradient, weight) or end.branch is None:
        return {}
    return _input_plans(
        tuple(end.like.shape), tuple(weight.shape), stride, gradient.device, end.form,
        end.add is not None, end.shortcut is not None,
    )  # fmt: skip


@functools.cache
def _input_plans(
    x: Dims, weight: Dims, stride: int, device: torch.device, form: int, add: bool, project: bool
) -> dict[str, Plan]:
    graph = input_graph(x, weight, stride, form, add, project)
    return plans(graph, device, _MOST_PLANS)


def input_graph(x: Dims, weight: Dims, stride: int, form: int, add: bool, project: bool) -> Graph:
    """The order of operations and of their operands is the one that cuDNN knows."""
    graph, into = Graph(), x[1]
    dx = graph.map("", x)
    gradient = graph.map("gradient", out_dims(x, weight, stride))
    graph.convolution("input", gradient, graph.map("weight", weight), dx, stride)
    maps = graph.map("x", x)
    before, norm = _normed(graph, maps, into, "")
    if add:
        dx = graph.pointwise("add", dx, graph.map("add", x))
    if form == MERGED:
        residual = graph.map("residual", x)
        if project:
            other, other_norm = _normed(graph, residual, into, "residual_")
            before = graph.pointwise("add", other, before)
        else:
            before = graph.pointwise("add", before, residual)
    dz = graph.pointwise("relu_backward", dx, before, name="dz")
    graph.norm_weights(norm, maps, dz, _factor_values(graph, into, ""))
    if project:
        graph.norm_weights(other_norm, residual, dz, _factor_values(graph, into, "residual_"))
    return graph


def _normed(
    graph: Graph, x: Value, channels: int, tag: str
) -> tuple[Value, tuple[Value, Value, Value]]:
    mean, inverse, gamma, beta = (
        graph.vector(f"{tag}{name}", channels) for name in ("mean", "inverse", "gamma", "beta")
    )
    maps = graph.pointwise("mul", graph.pointwise("sub", x, mean), inverse)
    maps = graph.pointwise("add", graph.pointwise("mul", maps, gamma), beta)
    return maps, (mean, inverse, gamma)


def _factor_values(graph: Graph, channels: int, tag: str) -> list[Value]:
    return [graph.vector(f"{tag}{name}", channels) for name in _FACTORS]


def _normed_tensors(norm: NormedMap, factors: Tensor, tag: str) -> dict[str, Tensor]:
    found = {f"{tag}mean": norm.saved[0], f"{tag}inverse": norm.saved[1]}
    found |= {f"{tag}gamma": norm.gamma.detach(), f"{tag}beta": norm.beta.detach()}
    return found | {f"{tag}{name}": factors[row] for row, name in enumerate(_FACTORS)}


def input_gradient(
    gradient: Tensor, weight: Tensor, end: Epilogue, stride: int
) -> dict[str, Callable[[], tuple[Tensor, tuple[Tensor, ...]]]]:
    """Forms that give the gradient behind `end`, and its factors (see `Gradients`)."""
    found = _input_plans_of(gradient, weight, end, stride)
    return {
        name: partial(_input_gradient, plan, gradient, weight, end) for name, plan in found.items()
    }


def _input_gradient(
    plan: Plan, gradient: Tensor, weight: Tensor, end: Epilogue
) -> tuple[Tensor, tuple[Tensor, ...]]:
    assert end.branch is not None
    dz = torch.empty_like(end.like)
    factors = [end.branch.saved.new_empty((5, dz.shape[1]))]
    tensors = {"gradient": gradient, "weight": weight, "dz": dz, "x": end.branch.x}
    tensors |= _normed_tensors(end.branch, factors[0], "")
    if end.add is not None:
        tensors["add"] = end.add
    if end.residual is not None:
        tensors["residual"] = end.residual
    if end.shortcut is not None:
        factors.append(torch.empty_like(factors[0]))
        tensors["residual"] = end.shortcut.x
        tensors |= _normed_tensors(end.shortcut, factors[1], "residual_")
    plan.run(tensors)
    return dz, tuple(factors)


def weight_gradient(
    gradient: Tensor, weight: Tensor, inputs: Operand, stride: int
) -> dict[str, Callable[[], Tensor]]:
    """Forms that compute the input, relu(norm(x)), while they load it."""
    if inputs.form != NORMALIZED or not can_run(gradient, weight):
        return {}
    found = _weight_plans(tuple(inputs.x.shape), tuple(weight.shape), stride, gradient.device)
    return {
        name: partial(_weight_gradient, plan, gradient, weight, inputs)
        for name, plan in found.items()
    }


@functools.cache
def _weight_plans(x: Dims, weight: Dims, stride: int, device: torch.device) -> dict[str, Plan]:
    return plans(weight_graph(x, weight, stride), device, _MOST_PLANS)


def weight_graph(x: Dims, weight: Dims, stride: int) -> Graph:
    graph = Graph()
    maps = graph.pointwise("relu", _affine(graph, graph.map("x", x), x[1], ""))
    gradient = graph.map("gradient", out_dims(x, weight, stride))
    graph.convolution("weight", maps, gradient, graph.map("found", weight), stride)
    return graph


def _weight_gradient(plan: Plan, gradient: Tensor, weight: Tensor, inputs: Operand) -> Tensor:
    assert inputs.saved is not None
    found = torch.empty_like(weight)
    tensors = {"x": inputs.x, "gradient": gradient, "found": found}
    plan.run(tensors | _affine_tensors(inputs.saved, ""))
    return found
