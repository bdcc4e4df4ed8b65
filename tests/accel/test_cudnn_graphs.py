"""Calls of cuDNN for a graph, recorded by a library that replaces it.

`cudnn_cases.py` computes the graphs; `test_cudnn_gpu.py` and `test_products_gpu.py` run cuDNN.
"""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.accel import cudnn_graphs
from paceline.accel.cudnn_graphs import CudnnError, Graph, Plan, plans

CPU = torch.device("cpu")
PLAN, PACK, TENSOR = 5, 16, 17
WORKSPACE = 48


class Library:
    """Descriptors by number, each with its kind and attributes. Two plans; the second is refused."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kinds: dict[int, int] = {}
        self.attributes: dict[int, dict[int, list[Any]]] = {}
        self.destroyed: list[int] = []
        self.executed: list[tuple[int, int]] = []
        self.configs: list[int] = []

    def destroy(self, at: ctypes.c_void_p) -> None:
        assert at.value is not None
        self.destroyed.append(at.value)

    def handle(self, device: torch.device) -> ctypes.c_void_p:
        return ctypes.c_void_p(7)

    def call(self, name: str, *given: Any) -> None:
        getattr(self, name.removeprefix("cudnnBackend"))(*given)

    def CreateDescriptor(self, kind: ctypes.c_int, at: Any) -> None:
        at._obj.value = 1000 + len(self.kinds)
        self.kinds[at._obj.value] = kind.value
        self.attributes[at._obj.value] = {}

    def SetAttribute(
        self, at: Any, name: ctypes.c_int, kind: ctypes.c_int, count: ctypes.c_int64, array: Any
    ) -> None:
        assert len(array) == count.value
        self.attributes[at.value][name.value] = list(array)

    def Finalize(self, at: ctypes.c_void_p) -> None:
        assert at.value is not None
        own = self.attributes[at.value]
        if self.kinds[at.value] == PLAN and own[401] == [self.configs[1]]:
            raise CudnnError("not supported")

    def GetAttribute(
        self, at: Any, name: ctypes.c_int, kind: ctypes.c_int, size: ctypes.c_int64, count: Any,
        array: Any,
    ) -> None:  # fmt: skip
        count._obj.value = 2 if name.value in (202, 302) else 1
        if array is None:
            return
        if name.value == 202:
            self.configs = list(array)
        # Engine 4; two settings, 9 = 1; and the workspace.
        elif name.value in (402, 600, 601, 1301):
            array[0] = {402: WORKSPACE, 600: 9, 601: 1, 1301: 4}[name.value]

    def Execute(self, handle: Any, plan: Any, pack: Any) -> None:
        assert handle.value == 7
        self.executed.append((plan.value, pack.value))

    def of(self, kind: int) -> list[dict[int, list[Any]]]:
        return [self.attributes[at] for at, own in self.kinds.items() if own == kind]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(cudnn_graphs, "_library", lambda: made)
    return made


def masked_gradient() -> Graph:
    """Builds dz, the gradient of the input masked by x > 0, and its sums."""
    graph = Graph()
    dx, x = graph.map("", (2, 8, 4, 6)), graph.map("x", (2, 8, 4, 6))
    gradient, weight = graph.map("gradient", (2, 16, 2, 3)), graph.map("weight", (16, 8, 3, 3))
    graph.convolution("input", gradient, weight, dx, 2)
    dz = graph.pointwise("relu_backward", dx, x, name="dz")
    norm = tuple(graph.vector(name, 8) for name in ("mean", "inverse", "gamma"))
    found = [graph.vector(name, 8) for name in "abcde"]
    graph.norm_weights((norm[0], norm[1], norm[2]), x, dz, found)
    return graph


def tensors() -> dict[str, torch.Tensor]:
    def new(*dims: int) -> torch.Tensor:
        made = torch.zeros(dims, dtype=torch.float16)
        return made.contiguous(memory_format=torch.channels_last)

    found = {"x": new(2, 8, 4, 6), "gradient": new(2, 16, 2, 3), "weight": new(16, 8, 3, 3)}
    found["dz"] = new(2, 8, 4, 6)
    return found | {name: torch.zeros(8) for name in ("mean", "inverse", "gamma", *"abcde")}


def only(found: dict[str, Plan]) -> Plan:
    (plan,) = found.values()
    return plan


def test_operations_have_their_operands_and_windows(library: Library) -> None:
    assert list(plans(masked_gradient(), CPU, 9)) == ["engine4,9=1,9=1"]
    ids = {own[906][0]: own for own in library.of(TENSOR)}
    at = {own[906][0]: number for number, own in library.attributes.items() if 906 in own}
    graph = masked_gradient()
    uids = {value.name or "dx": value.uid for value in graph.values}
    place = {name: [at[uid]] for name, uid in uids.items()}
    (convolution,), (window,) = library.of(12), library.of(1)
    assert (convolution[711], convolution[709], convolution[710]) == (
        place["gradient"], place["weight"], place["dx"],
    )  # fmt: skip
    assert (convolution[706], convolution[707]) == ([1.0], [0.0])
    assert (window[103], window[104], window[105]) == ([2, 2], [1, 1], [1, 1])
    (pointwise,) = library.of(13)
    assert (pointwise[757], pointwise[751], pointwise[756]) == (
        place["dx"], place["x"], place["dz"],
    )  # fmt: skip
    (weights,) = library.of(23)
    names = ("mean", "inverse", "gamma", "x", "dz", *"abcde")
    assert [weights[1621 + row] for row in range(10)] == [place[name] for name in names]
    # Half precision and strides of channels-last memory; what has no name is not stored.
    assert ids[uids["x"]][901] == [2]
    assert ids[uids["x"]][903] == [192, 1, 48, 8]
    assert (ids[uids["dx"]][901], ids[uids["dx"]][907]) == ([0], [True])
    assert (ids[uids["mean"]][901], ids[uids["mean"]][907]) == ([0], [False])


def test_a_plan_gets_the_tensors_by_number(library: Library) -> None:
    plan = only(plans(masked_gradient(), CPU, 9))
    given = tensors()
    plan.run(given)
    (pack,) = library.of(PACK)
    uids = {value.uid: value.name for value in masked_gradient().values}
    assert [given[uids[uid]].data_ptr() for uid in pack[1000]] == pack[1001]
    assert len(pack[1001]) == len(given)
    assert len(library.executed) == 1


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("x", torch.zeros(2, 8, 4, 6, dtype=torch.float16)),
        ("x", torch.zeros(2, 8, 4, 5, dtype=torch.float16)),
        ("mean", torch.zeros(8, dtype=torch.float16)),
        ("mean", torch.zeros(16)),
        ("mean", torch.zeros(16)[::2]),
    ],
    ids=("order", "shape", "type", "length", "stride"),
)
def test_a_tensor_that_cudnn_would_misread_is_refused(
    library: Library, name: str, wrong: torch.Tensor
) -> None:
    plan = only(plans(masked_gradient(), CPU, 9))
    with pytest.raises(AssertionError):
        plan.run(tensors() | {name: wrong})
    assert not library.executed


def test_descriptors_are_freed(library: Library) -> None:
    plan = only(plans(masked_gradient(), CPU, 9))
    plan.run(tensors())
    plan.run(tensors())
    del plan
    assert sorted(library.destroyed) == sorted(library.kinds)


def test_a_plan_is_found_by_its_name(library: Library) -> None:
    assert list(plans(masked_gradient(), CPU, 9, "engine4,9=1,9=1")) == ["engine4,9=1,9=1"]
    with pytest.raises(CudnnError, match="no kernel for this graph"):
        plans(masked_gradient(), CPU, 9, "engine5")


def test_a_graph_without_a_kernel_has_the_reason(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(at: object) -> None:
        raise CudnnError("NOT_SUPPORTED: too odd")

    monkeypatch.setattr(library, "Finalize", refuse)
    with pytest.raises(CudnnError, match="too odd"):
        plans(masked_gradient(), CPU, 9)


class Functions(SimpleNamespace):
    """A library with all functions but those that are named."""

    def __init__(self, *without: str, version: int = 91900) -> None:
        names = set(cudnn_graphs._FUNCTIONS) - set(without)
        super().__init__(**{name: SimpleNamespace() for name in names})
        if "cudnnGetVersion" in names:
            self.cudnnGetVersion = Version(version)


class Version:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self) -> int:
        return self.number


@pytest.mark.parametrize(
    ("torch_has", "loaded", "reason"),
    [
        (None, Functions(), "this build of torch has no cuDNN"),
        (8907, Functions(), "torch has cuDNN 8907, older than 90000"),
        (RuntimeError("compiled\nfor another"), Functions(), "compiled for another"),
        (91900, OSError("no such\nfile"), r"libcudnn.so.9 cannot be loaded \(no such file\)"),
        (91900, Functions("cudnnBackendExecute"), "libcudnn.so.9 has no cudnnBackendExecute"),
        (91900, Functions(version=91000), "has version 91000, and torch uses 91900"),
    ],
    ids=("cpu", "old", "broken", "missing", "symbol", "other"),
)
def test_a_library_that_cannot_be_used_has_one_clear_line(
    torch_has: object, loaded: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(value: object) -> object:
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: given(torch_has))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: given(loaded))
    cudnn_graphs._library.cache_clear()
    with pytest.raises(CudnnError, match=reason) as caught:
        cudnn_graphs.version()
    assert "\n" not in str(caught.value)


def test_the_library_of_torch_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Functions())
    cudnn_graphs._library.cache_clear()
    assert cudnn_graphs.version() == 91900
    cudnn_graphs._library.cache_clear()
