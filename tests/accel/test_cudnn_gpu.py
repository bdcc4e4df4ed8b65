"""Each graph of cuDNN on a GPU against float64, with the same inputs: nothing adds up over layers, so the
bounds are those of one rounding to fp16. `test_products_gpu.py` has whole blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from accel.graph_reference import ReferencePlan
from full_products import full_products
from paceline.accel import cudnn_forms
from paceline.accel.cudnn_graphs import CudnnError, Graph, Value, plans
from paceline.accel.operands import JOINED, MASKED, MERGED, NORMALIZED, PLAIN, PROJECTED

pytestmark = pytest.mark.gpu

# Graphs computed in float32 with operand and result rounded to fp16, on a CPU, are up to 4.3e-4 away.
NEAR = 2e-3
# Output and input channels, size of the weight, stride.
PRODUCTS = [(24, 96, 1, 1), (72, 288, 1, 1), (64, 256, 1, 1), (128, 64, 1, 1)]
CONVOLUTIONS = [(24, 24, 3, 1), (72, 72, 3, 2), (64, 64, 3, 1), (128, 128, 3, 2)]

Shape = tuple[int, int, int, int]
Make = Callable[[tuple[int, ...], tuple[int, ...], int], Graph]
FORWARD: dict[str, Make] = {
    "plain": lambda x, w, s: cudnn_forms.forward_graph(x, w, s, PLAIN, False),
    "normalized": lambda x, w, s: cudnn_forms.forward_graph(x, w, s, NORMALIZED, False),
    "joined": lambda x, w, s: cudnn_forms.forward_graph(x, w, s, JOINED, True),
    "projected": lambda x, w, s: cudnn_forms.forward_graph(x, w, s, PROJECTED, True),
}
BACKWARD: dict[str, Make] = {
    "masked": lambda x, w, s: cudnn_forms.input_graph(x, w, s, MASKED, False, False),
    "merged": lambda x, w, s: cudnn_forms.input_graph(x, w, s, MERGED, False, False),
    "merged added": lambda x, w, s: cudnn_forms.input_graph(x, w, s, MERGED, True, False),
    "merged projected": lambda x, w, s: cudnn_forms.input_graph(x, w, s, MERGED, True, True),
    "weight": cudnn_forms.weight_graph,
}


def drawn(value: Value, draw: torch.Generator) -> Tensor:
    """Maps and weights as random numbers about 0, factors of norms about 1, all different by channel."""
    kind = torch.float16 if value.half else torch.float32
    if value.dims[2:] == (1, 1) and value.dims[0] == 1:
        low, high = (-0.5, 0.5) if value.name.endswith(("shift", "beta", "mean")) else (0.5, 1.5)
        numbers = torch.rand(value.dims[1], generator=draw, device="cuda") * (high - low) + low
        return numbers.to(kind)
    numbers = torch.randn(value.dims, generator=draw, device="cuda")
    if value.name == "weight":
        numbers /= numbers[0].numel() ** 0.5
    return numbers.to(kind).contiguous(memory_format=torch.channels_last)


def check(graph: Graph, most: int = 4) -> None:
    """Outputs start as NaN, so that one that is not written is seen."""
    draw = torch.Generator("cuda").manual_seed(0)
    written = {out for node in graph.nodes for out in node.outputs}
    stored = [value for value in graph.values if value.name]
    inputs = {value.name: drawn(value, draw) for value in stored if value not in written}
    outputs = {value.name: drawn(value, draw) for value in stored if value in written}
    exact = {name: tensor.double() for name, tensor in (inputs | outputs).items()}
    ReferencePlan(graph, torch.float64).run(exact)
    for plan in plans(graph, torch.device("cuda", torch.cuda.current_device()), most).values():
        for tensor in outputs.values():
            tensor.fill_(torch.nan)
        plan.run(inputs | outputs)
        for name, tensor in outputs.items():
            away = (tensor.double() - exact[name]).norm() / exact[name].norm()
            assert away < NEAR, (name, float(away))


def graph_of(make: Make, shape: Shape) -> Graph:
    out, into, size, stride = shape
    return make((6, into, 13, 11), (out, into, size, size), stride)


@pytest.mark.parametrize("shape", [*PRODUCTS, *CONVOLUTIONS, (96, 48, 1, 2)], ids=str)
@pytest.mark.parametrize("form", ["plain", "normalized", "masked", "weight"])
def test_convolutions_behind_a_norm(form: str, shape: Shape) -> None:
    if shape[2:] == (1, 2) and form != "plain":
        pytest.skip("a shortcut takes a stored map")
    with full_products():
        check(graph_of((FORWARD | BACKWARD)[form], shape))


behind_a_block = pytest.mark.parametrize(
    "form", ["joined", "projected", "merged", "merged added", "merged projected"]
)


@pytest.mark.parametrize("shape", PRODUCTS, ids=str)
@behind_a_block
def test_products_behind_a_block(form: str, shape: Shape) -> None:
    with full_products():
        check(graph_of((FORWARD | BACKWARD)[form], shape))


@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=str)
@behind_a_block
def test_convolutions_behind_a_block(form: str, shape: Shape) -> None:
    """cuDNN 9.19 has gradients of stride 1 only. What another version takes is tested, too."""
    graph = graph_of((FORWARD | BACKWARD)[form], shape)
    if form in FORWARD or shape[3] > 1:
        try:
            plans(graph, torch.device("cuda", torch.cuda.current_device()), 1)
        except CudnnError as error:
            pytest.skip(f"refused: {error}")
    with full_products():
        check(graph)
