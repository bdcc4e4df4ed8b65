"""`benchmarks.kernels`: the bytes of a call, kernels joined with the calls that launched them, and
the rows of a step."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.kernels import Call, CallCounter, Launched, attributed, grouped, profile_step
from paceline.accel.cudnn_graphs import Graph, Plan
from paceline.tune.step import StepRow


def calls_of(work: Any) -> list[Call]:
    with CallCounter() as counter:
        work()
    return [counter.calls[number] for number in sorted(counter.calls)]


def test_what_a_call_reads_and_writes_counts_once_each() -> None:
    a, b = torch.ones(8, 4), torch.ones(8, 4)
    cases: list[tuple[Any, int]] = [
        (lambda: a + b, 3 * 128),
        (lambda: a + a, 2 * 128),
        (lambda: a.add_(b), 3 * 128),
        (lambda: a.copy_(b), 2 * 128),
        (lambda: a.zero_(), 128),
        (lambda: torch.add(a, b, out=torch.empty(8, 4)), 3 * 128),
        (lambda: a + torch.ones(1, 4).expand(8, 4), 2 * 128 + 16),
        (lambda: torch._foreach_add_([a, b], 1.0), 4 * 128),
        (lambda: a.half(), 128 + 64),
    ]
    for work, moved in cases:
        assert calls_of(work)[-1].moved == moved
    assert calls_of(lambda: a.view(4, 8).t().detach()) == []
    assert calls_of(lambda: torch.empty(8)) == []


def test_products_have_their_operations_in_forward_and_backward() -> None:
    images = torch.ones(2, 3, 8, 8)
    weight = torch.ones(5, 3, 3, 3, requires_grad=True)
    found = calls_of(lambda: F.conv2d(images, weight).sum().backward())
    flops = {call.name: call.flops for call in found}
    one = 2 * 2 * 5 * 3 * 9 * 36
    assert flops["convolution"] == one
    assert flops["convolution_backward"] == one, "no gradient of the images is asked for"
    (forward,) = [call for call in found if call.name == "convolution"]
    assert forward.moved == 4 * (2 * 3 * 64 + 5 * 27 + 2 * 5 * 36)
    assert forward.shape == "2×3×8×8"


def test_triton_kernels_are_noted_by_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    class JITFunction:
        def __init__(self, name: str, *arguments: str) -> None:
            self.fn, self.arg_names = SimpleNamespace(__name__=name), list(arguments)

        def run(self, *args: Any, **named: Any) -> str:
            return self.fn.__name__

    module = ModuleType("triton.runtime.jit")
    module.JITFunction = JITFunction  # type: ignore[attr-defined]
    for name in ("triton", "triton.runtime"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    launch, counter = JITFunction.run, CallCounter()
    x, y = torch.ones(16), torch.ones(2, 16)
    described = SimpleNamespace(base=y)
    with counter.triton_kernels():
        assert JITFunction("norm", "x", "y").run(x, described, x, 3, grid=(1,)) == "norm"
        JITFunction("update", "table", "hyper").run(x, y, grid=(1,))
        JITFunction("built", "x").run(x, grid=(1,), warmup=True)
    assert launch is JITFunction.run
    assert list(counter.calls.values()) == [
        Call("triton norm", 64 + 128, 0, "2×16"), Call("triton update", None, 0, "2×16"),
    ]  # fmt: skip


def test_graphs_of_cudnn_are_noted_by_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Plan] = []
    monkeypatch.setattr(Plan, "run", lambda plan, _: ran.append(plan))
    execute, counter = Plan.run, CallCounter()
    x, weight, out = (2, 8, 5, 5), (16, 8, 3, 3), (2, 16, 3, 3)
    sums = 2 * 4 * 16
    for kind, given in (
        ("forward", ((x, "x"), (weight, "weight"), (out, "out"))),
        ("input", ((out, "gradient"), (weight, "weight"), (x, "dx"))),
        ("weight", ((x, "x"), (out, "gradient"), (weight, "found"))),
    ):
        graph = Graph()
        graph.convolution(kind, *(graph.map(name, dims) for dims, name in given), 2)
        if kind == "forward":
            vectors = [graph.vector(name, 16) for name in ("sum", "squares")]
            graph.statistics(graph.values[2], *vectors)
        graph.map("", out)  # is not stored
        plan = object.__new__(Plan)
        plan.graph = graph
        tensors = {
            value.name: torch.ones(value.dims, dtype=torch.float16 if value.half else None)
            for value in graph.values
        }
        with counter.cudnn_graphs():
            plan.run(tensors)
    assert len(ran) == 3
    assert execute is Plan.run
    flops, moved = 2 * math.prod(out) * 8 * 9, 2 * sum(map(math.prod, (x, weight, out)))
    assert list(counter.calls.values()) == [
        Call("cudnn forward", moved + sums, flops, "16×8×3×3"),
        Call("cudnn input", moved, flops, "16×8×3×3"),
        Call("cudnn weight", moved, flops, "16×8×3×3"),
    ]


def event(kind: str, name: str, begin: float, length: float, thread: int, **args: Any) -> Any:
    times = {"ts": begin, "dur": length}
    return {"ph": "X", "cat": kind, "name": name, "tid": thread, **times, "args": args}


# A forward thread (1) and a backward thread (2); kernels run later, on a stream.
TRACE = [
    {"ph": "M", "name": "process_name"},
    event("user_annotation", "paceline call 0", 10, 10, 1),
    event("user_annotation", "paceline call 1", 30, 10, 1),
    event("user_annotation", "paceline call 2", 10, 30, 2),
    event("user_annotation", "another", 0, 100, 1),
    event("cuda_runtime", "cudaLaunchKernel", 12, 1, 1, correlation=5),
    event("cuda_driver", "cuLaunchKernelEx", 15, 1, 1, correlation=6),
    event("cuda_runtime", "cudaLaunchKernel", 25, 1, 1, correlation=7),
    event("cuda_runtime", "cudaLaunchKernel", 35, 1, 2, correlation=8),
    event("cuda_runtime", "cudaDeviceSynchronize", 90, 1, 1),
    event("kernel", "conv", 100, 300, 7, correlation=5),
    event("kernel", "layout", 400, 50, 7, correlation=6),
    event("gpu_memcpy", "Memcpy HtoD", 450, 20, 7, correlation=7),
    event("kernel", "backward", 470, 100, 7, correlation=8),
    event("kernel", "lost", 570, 10, 7),
]


def test_a_kernel_belongs_to_the_call_that_launched_it() -> None:
    found = attributed(TRACE, on_gpu=True)
    assert [(each.call, each.kernels, round(1e6 * each.seconds)) for each in found] == [
        (0, ("conv", "layout"), 350), (2, ("backward",), 100),
        (None, ("Memcpy HtoD",), 20), (None, ("lost",), 10),
    ]  # fmt: skip
    on_cpu = {each.call: round(1e6 * each.seconds) for each in attributed(TRACE, on_gpu=False)}
    assert on_cpu == {0: 10, 1: 10, 2: 30}


def test_rows_are_for_one_step_and_the_longest_comes_first() -> None:
    calls = {
        0: Call("add", 600, 0, "3"), 1: Call("add", 1000, 0, "5"), 2: Call("mm", 100, 8000, "9"),
        3: Call("triton update", None, 0, "9"),
    }  # fmt: skip
    launched = [
        Launched(0, ("k",), 1e-6), Launched(1, ("k",), 3e-6), Launched(2, ("gemm",), 8e-6),
        Launched(3, ("u",), 2e-6), Launched(None, ("copy",), 1e-6),
    ]  # fmt: skip
    rows = [row.to_dict(2, 1e9) for row in grouped(launched, calls, shapes=False)]
    assert [row["call"] for row in rows] == ["mm", "add", "triton update", "–"]
    product, added, update, _ = rows
    assert (added["calls"], added["ms"], added["mb"]) == pytest.approx((1, 2e-3, 8e-4))
    assert added["limit_ms"] == pytest.approx(8e-4)
    assert added["share_of_copy"] == pytest.approx(0.4)
    assert product["tflops_per_s"] == pytest.approx(1e-3)
    assert (update["mb"], update["limit_ms"], update["share_of_copy"]) == (None, None, None)
    by_shape = grouped(launched, calls, shapes=True)
    assert {row.shape for row in by_shape if row.name == "add"} == {"3", "5"}


def test_the_rows_of_a_step() -> None:
    row = StepRow(
        name="kernels", kind="ours", model="resnet_tiny", batch_size=4, image_size=28, classes=5,
        device="cpu", steps=2, warm_up=1, switches={"run.accel.recompute_norms": True},
    )  # fmt: skip
    found = profile_step(row)
    rows = {each["call"]: each for each in found["rows"]}
    # As many as the model has, forward and backward.
    assert rows["convolution"]["calls"] == rows["convolution_backward"]["calls"] == 12
    assert found["limit_ms"] > 0
    assert found["device_ms"] == pytest.approx(sum(each["ms"] for each in found["rows"]))
    assert "norms recomputed" in found["step"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_of_a_gpu_have_their_calls() -> None:
    row = StepRow(
        name="kernels", kind="ours", model="resnet18", batch_size=64, image_size=64, classes=10,
        device="cuda", steps=2, warm_up=3, switches={"precision.amp_dtype": "fp16"},
    )  # fmt: skip
    found = profile_step(row)
    nameless_ms = sum(each["ms"] for each in found["rows"] if each["call"] == "–")
    assert nameless_ms < 0.1 * found["device_ms"]
    calls = {each["call"] for each in found["rows"]}
    assert {"convolution", "convolution_backward"} < calls
    assert any(name.startswith("triton ") for name in calls)
    assert all(each["kernels"] for each in found["rows"])
    assert 0 < found["limit_ms"] < found["device_ms"]
