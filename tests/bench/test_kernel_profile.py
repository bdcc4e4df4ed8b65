"""`benchmarks.kernels`: the bytes of a call, kernels joined with the calls that launched them, and
the rows of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.kernels import Call, CallCounter, Launched, attributed, grouped, profile_step
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


@pytest.mark.gpu
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
