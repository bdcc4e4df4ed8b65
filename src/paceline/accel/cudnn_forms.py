"""Computes the convolutions of fused blocks and their gradients with cuDNN, in fp16 on a GPU.

In the forward pass, a kernel computes relu(norm(x)), relu(norm(x) + residual) or relu(norm(x) +
norm(residual)) while it loads the input of the convolution, and sums the statistics of the next
norm. In the backward pass, one kernel computes the input's gradient, adds the second gradient,
applies the ReLU and sums the gradients of γ and β. Another kernel computes the weight's gradient
and recomputes relu(norm(x)) for it. cuDNN reads a norm's scale and shift in fp16 (the fifth row of
`fused.join_moments`). It sums values, not deviations from the running mean, in no fixed order.

The functions `forward`, `input_gradient` and `weight_gradient` return implementations by name: all
that are worth timing, or only the one called `wanted`. They raise `CudnnError` if there is none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.accel.cudnn_graphs import ALIGNMENT, CudnnError, Graph, Plan, Value, plans
from paceline.accel.fused import Moments
from paceline.accel.operands import (
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

# The most plans to time, in the order of cuDNN's heuristics.
_MOST_PLANS = 6
_FACTORS = ("dgamma", "dbeta", "a", "b", "c")
# The most elements of an activation, because cuDNN's kernels may count them with 32 bits.
_MOST_ELEMENTS = 2**31 - 1
_PREFIX, _STATISTICS = "cudnn ", "cudnn statistics "


def check(weight: Tensor, *maps: Tensor | None, vectors: Sequence[Tensor] = ()) -> None:
    """Raises `CudnnError` if cuDNN does not support the tensors or cannot read them correctly.

    `maps` are activations, and `vectors` are parameters of norms.
    """
    given = [each for each in maps if each is not None]
    kinds = {each.dtype for each in (weight, *given)}
    if kinds != {torch.float16}:
        names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise CudnnError(f"needs fp16, not {names}")
    if not all(each.is_cuda for each in given):
        raise CudnnError("needs a GPU")
    if weight.shape[0] % 8 or weight.shape[1] % 8:
        raise CudnnError("needs a multiple of 8 channels")
    if max(each.numel() for each in given) > _MOST_ELEMENTS:
        raise CudnnError("needs maps of less than 2³¹ elements")
    # A weight may begin at any address, because it may be a view of a flat buffer.
    if any(each.data_ptr() % ALIGNMENT for each in (weight, *given, *vectors)):
        raise CudnnError(f"needs tensors at multiples of {ALIGNMENT} bytes")
    if not all(each.is_contiguous(memory_format=torch.channels_last) for each in (weight, *given)):
        raise CudnnError("needs channels-last memory")
    if any(each.dtype != torch.float32 or not each.is_contiguous() for each in vectors):
        raise CudnnError("needs norms in float32")


def _new_map(dims: Dims, like: Tensor) -> Tensor:
    return torch.empty(
        dims, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


class _Plans:
    """cuDNN's kernels for a graph, built on demand: if the choice is known, only one is built."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        self._graph, self._device = graph, device
        self._found: dict[str, Plan] = {}
        self._complete = False

    def get(self, wanted: str) -> dict[str, Plan]:
        """Returns the kernel called `wanted` or, if `wanted` is "", all kernels worth timing."""
        if wanted:
            if wanted not in self._found:
                self._found |= plans(self._graph, self._device, 1, wanted)
            return {wanted: self._found[wanted]}
        if not self._complete:
            self._found = plans(self._graph, self._device, _MOST_PLANS)
            self._complete = True
        return self._found


# Forward


def forward(
    operand: Operand, weight: Tensor, stride: int, keep: bool, wanted: str = ""
) -> dict[str, Callable[[], tuple[Tensor, Moments, Tensor | None]]]:
    """Returns implementations of a convolution, for `fused_convolutions.forward_convolution`.

    Each returns the output, partial sums for the statistics of the next norm, and the input that it
    computed, which is None unless `keep` is True.
    """
    dims = out_dims(tuple(operand.x.shape), tuple(weight.shape), stride)
    check(weight, operand.x, operand.other)
    if math.prod(dims) > _MOST_ELEMENTS:
        raise CudnnError("needs maps of less than 2³¹ elements")
    shapes = (tuple(operand.x.shape), tuple(weight.shape), stride, operand.x.device)
    kinds = [(_STATISTICS, PLAIN, False)]
    # cuDNN does not store relu(norm(x)), although it accepts a graph that requests it. JOINED and
    # PROJECTED operands always have to be stored.
    if operand.form in (JOINED, PROJECTED) or (operand.form == NORMALIZED and not keep):
        kinds.append((_PREFIX, operand.form, operand.form != NORMALIZED))
    if wanted:  # the longest prefix comes first
        kinds = [kind for kind in kinds if wanted.startswith(kind[0])][:1]
    found: dict[str, Callable[[], tuple[Tensor, Moments, Tensor | None]]] = {}
    refused = ""
    for prefix, form, side in kinds:
        fused = form != PLAIN
        try:
            made = _forward_plans(*shapes, form, side).get(wanted.removeprefix(prefix))
        except CudnnError as error:
            refused = str(error)  # keeping the error would keep this frame and its activations
            continue
        for name, plan in made.items():
            found[prefix + name] = partial(
                _forward, plan, operand, weight, stride, fused, side or not fused
            )
    if not found:
        raise CudnnError(refused or f"has no form {wanted!r}")
    return found


@functools.cache
def _forward_plans(
    x: Dims, weight: Dims, stride: int, device: torch.device, form: int, keep: bool
) -> _Plans:
    return _Plans(forward_graph(x, weight, stride, form, keep), device)


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


@functools.cache
def _input_plans(
    x: Dims, weight: Dims, stride: int, device: torch.device, form: int, add: bool, project: bool
) -> _Plans:
    return _Plans(input_graph(x, weight, stride, form, add, project), device)


def input_graph(x: Dims, weight: Dims, stride: int, form: int, add: bool, project: bool) -> Graph:
    """Builds cuDNN's graph for the gradient of a convolution's input.

    cuDNN supports only this order of operations and operands.
    """
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
    gradient: Tensor, weight: Tensor, end: Epilogue, stride: int, wanted: str = ""
) -> dict[str, Callable[[], tuple[Tensor, tuple[Tensor, ...]]]]:
    """Returns implementations of the gradient of a convolution's input, followed by `end`.

    Each returns that gradient, and the gradients of the norms (`Gradients.joined`).
    """
    assert end.branch is not None
    norms = [norm for norm in (end.branch, end.shortcut) if norm is not None]
    vectors = [each for norm in norms for each in (norm.gamma.detach(), norm.beta.detach())]
    maps = (gradient, end.like, end.add, end.residual, *(norm.x for norm in norms))
    check(weight, *maps, vectors=vectors)
    found = _input_plans(
        tuple(end.like.shape), tuple(weight.shape), stride, gradient.device, end.form,
        end.add is not None, end.shortcut is not None,
    )  # fmt: skip
    return {
        _PREFIX + name: partial(_input_gradient, plan, gradient, weight, end)
        for name, plan in found.get(wanted.removeprefix(_PREFIX)).items()
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
    gradient: Tensor, weight: Tensor, inputs: Operand, stride: int, wanted: str = ""
) -> dict[str, Callable[[], Tensor]]:
    """Returns implementations of the gradient of a convolution's weight.

    The input of the convolution is relu(norm(x)), which they compute while they load x.
    """
    assert inputs.form == NORMALIZED
    check(weight, gradient, inputs.x)
    shapes = (tuple(inputs.x.shape), tuple(weight.shape), stride, gradient.device)
    found = _weight_plans(*shapes).get(wanted.removeprefix(_PREFIX))
    return {
        _PREFIX + name: partial(_weight_gradient, plan, gradient, weight, inputs)
        for name, plan in found.items()
    }


@functools.cache
def _weight_plans(x: Dims, weight: Dims, stride: int, device: torch.device) -> _Plans:
    return _Plans(weight_graph(x, weight, stride), device)


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
