"""Graphs of cuDNN, computed by torch's operators, and how near blocks with such graphs have to be."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from paceline.accel.cudnn_graphs import Graph, Node, Value

# An error of δ, relative, of what goes into a ReLU changes the sign of 0.32 · δ of its elements. Half of
# them are lit, so the gradient behind it changes by √(0.64 · δ) of its norm, and behind the six ReLUs of
# two blocks by 2 · √δ: 0.06 where fp16 puts δ at 1e-3. Emulated on a CPU with 40 seeds, all gradients
# were up to 2.3 · √δ away (root of the mean square; median 1.1, as with separate operators), and, signs
# being few, a single tensor of few channels up to 4.3 · √δ (records/fused-convolutions).
ALL_SIGNS, SIGNS, GRADIENTS_NEAR = 3.0, 6.0, 5e-3
# Outputs and statistics; up to 1.2e-3 in that emulation.
MAPS_NEAR = 2.5e-3


class ReferencePlan:
    """Computes a graph node by node in `kind`, and rounds what is stored to the tensor's type."""

    def __init__(self, graph: Graph, kind: torch.dtype = torch.float32) -> None:
        self.graph, self.kind = graph, kind

    def run(self, tensors: Mapping[str, Tensor]) -> None:
        made = {out for node in self.graph.nodes for out in node.outputs}
        known = {
            value: tensors[value.name].to(self.kind).reshape(value.dims)
            for value in self.graph.values
            if value not in made
        }
        for node in self.graph.nodes:
            results = self.compute(node, known)
            for value, result in zip(node.outputs, results, strict=True):
                known[value] = result
                if value.name:
                    stored = tensors[value.name]
                    stored.copy_(result.reshape(stored.shape))
                    known[value] = stored.to(self.kind).reshape(value.dims)

    def compute(self, node: Node, known: Mapping[Value, Tensor]) -> tuple[Tensor, ...]:
        given, stride = [known[value] for value in node.inputs], node.stride
        dims = node.outputs[0].dims
        match node.operation:
            case "add":
                return (given[0] + given[1],)
            case "sub":
                return (given[0] - given[1],)
            case "mul":
                return (given[0] * given[1],)
            case "relu":
                return (given[0].relu(),)
            case "relu_backward":
                return (torch.where(given[1] > 0, given[0], 0.0),)
            case "forward":
                return (F.conv2d(*given, None, stride, given[1].shape[2] // 2),)
            case "input":
                pad = given[1].shape[2] // 2
                return (conv2d_input(dims, given[1], given[0], stride, pad),)
            case "weight":
                return (conv2d_weight(given[0], dims, given[1], stride, dims[2] // 2),)
            case "statistics":
                return given[0].sum((0, 2, 3)), given[0].square().sum((0, 2, 3))
        assert node.operation == "norm_weights"
        mean, inverse, gamma, x, dz = given
        rows = x.numel() / x.shape[1]
        dbeta = dz.sum((0, 2, 3), keepdim=True)
        dgamma = (dz * (x - mean) * inverse).sum((0, 2, 3), keepdim=True)
        a = gamma * inverse
        b = -a * inverse * dgamma / rows
        return dgamma, dbeta, a, b, -a * dbeta / rows - b * mean


def is_gradient(name: str) -> bool:
    return name != "y" and not name.endswith(("running_mean", "running_var", "tracked"))


def spread(distances: Mapping[str, float]) -> float:
    """Returns the root mean square of all gradients."""
    gradients = [value for name, value in distances.items() if is_gradient(name)]
    return float((sum(value**2 for value in gradients) / len(gradients)) ** 0.5)


def assert_near_but_for_signs(distances: Mapping[str, float]) -> None:
    """Output `y` and statistics are within rounding, and gradients within what signs make of that."""
    root = distances["y"] ** 0.5
    assert spread(distances) < ALL_SIGNS * root + GRADIENTS_NEAR
    for name, value in distances.items():
        limit = SIGNS * root + GRADIENTS_NEAR if is_gradient(name) else MAPS_NEAR
        assert value < limit, (name, value)
