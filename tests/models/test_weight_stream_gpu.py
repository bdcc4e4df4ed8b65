"""Weight gradients on a second CUDA stream, which is made late: whoever reads a gradient, or takes the
memory that one reads, before it is complete, ends with other weights."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from full_products import full_products
from models.test_products_gpu import CUDNN, prefer, prepared, resnet18, resnet50
from paceline.bench.step import StepRow, build_step
from paceline.comm import CommSettings, Group
from paceline.core.topology import Topology
from paceline.models import weight_stream
from paceline.models.recompute import recompute_norms
from paceline.models.weight_stream import CudaSideStream, WeightStream, use_weight_stream
from train.steps import weights
from train.test_memory_gpu import peak_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 5
# About 0.2 ms, longer than a layer's gradient of these small batches.
LATE_CYCLES = 400_000


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that repeat bit by bit, among those that a step may choose."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with full_products():
        yield


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A late second stream. For each gradient that was launched, whether autograd takes it as it is."""
    fork, layout, found = CudaSideStream.fork, weight_stream._same_layout, []

    @contextmanager
    def late(self: CudaSideStream) -> Iterator[None]:
        with fork(self):
            torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]
            yield

    def noted(gradient: Tensor, weight: Tensor) -> bool:
        found.append(layout(gradient, weight))
        return found[-1]

    monkeypatch.setattr(CudaSideStream, "fork", late)
    monkeypatch.setattr(weight_stream, "_same_layout", noted)
    return found


def convolutions(net: nn.Module) -> int:
    return sum(isinstance(part, nn.Conv2d) for part in net.modules())


@contextmanager
def own_group(launched: bool) -> Iterator[Group]:
    """`launched`: one rank of a launcher, whose collectives are really called."""
    device = torch.device("cuda", torch.cuda.current_device())
    place = Topology()
    if launched:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = Topology(master_port=free.getsockname()[1], launcher="environment")
    with Group(place, CommSettings(), device) as group:
        yield group


def trained(
    model: str, batch: int, size: int, switches: dict[str, Any], launched: bool = False
) -> tuple[list[float], Tensor, int]:
    """Losses and weights of a few steps of the trainer, and the number of convolutions."""
    row = StepRow("test", "ours", model, batch, size, 10, "cuda", STEPS, 1, switches)
    with own_group(launched) as group:
        step, words = build_step(row, group)
        assert ("second stream" in words) == ("run.weight_stream" in switches)
        assert step.exchange.overlaps == launched
        outcomes = [step.run(number, 0.1) for number in range(STEPS)]
        assert sum(outcome.skipped for outcome in outcomes) < STEPS - 1
        found = weights(step)
        step.release()
        step.exchange.close()
        return [outcome.loss for outcome in outcomes], found, convolutions(step.model)


MODELS = {"resnet18": (32, 32), "resnet50": (8, 64), "alexnet_bn": (8, 224)}
KINDS: dict[str, dict[str, Any]] = {
    "captured": {"run.cuda_graphs": "on"},
    "eager": {"run.cuda_graphs": "off"},
    "recomputed": {"run.cuda_graphs": "on", "run.recompute_norms": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_training_has_the_same_bits(model: str, kind: str, taken: list[bool]) -> None:
    switches = {"precision.amp_dtype": "fp16", **KINDS[kind]}
    losses, after, count = trained(model, *MODELS[model], switches)
    assert taken == []
    ours, found, _ = trained(model, *MODELS[model], {**switches, "run.weight_stream": "on"})
    assert ours == losses
    assert found.isfinite().all()
    assert torch.equal(found, after)
    # Captured: two eager steps and the capture.
    passes = STEPS if kind == "eager" else 3
    assert taken == [True] * passes * (count - 1)


@pytest.mark.parametrize("kind", ["captured", "eager"])
def test_buckets_that_are_sent_during_backward_have_their_gradients(
    kind: str, taken: list[bool]
) -> None:
    switches = {"precision.amp_dtype": "fp16", "comm.algorithm": "native", "comm.fusion_mib": 1.0}
    switches |= KINDS[kind]
    losses, after, _ = trained("resnet18", 32, 32, switches, launched=True)
    switches["run.weight_stream"] = "on"
    ours, found, _ = trained("resnet18", 32, 32, switches, launched=True)
    assert ours == losses
    assert torch.equal(found, after)
    assert taken
    assert all(taken)


def learned(make: Callable[[], nn.Module], on: bool, graph: bool, recompute: bool) -> Tensor:
    """Losses of SGD with fused convolutions on the same few images."""
    torch.manual_seed(0)
    net = make()
    masters = [p.detach().clone().cuda() for p in net.parameters()]
    net = prepared(net, torch.float16, True)
    recompute_norms(net, recompute)
    stream = WeightStream()
    use_weight_stream(net, stream if on else None)
    side, rate = (64, 0.02) if make is resnet50 else (32, 0.1)
    images = torch.randn(16, 3, side, side, generator=torch.Generator().manual_seed(1))
    images = images.cuda().half().contiguous(memory_format=torch.channels_last)
    labels = torch.arange(16, device="cuda")
    found = torch.zeros(STEPS + 3, device="cuda")
    at = torch.zeros(1, dtype=torch.int64, device="cuda")

    def step() -> None:
        loss = F.cross_entropy(net(images).float(), labels)
        with stream.backward():
            (loss * 128).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            found.index_copy_(0, at, loss.view(1))
            at.add_(1)
            for master, parameter in zip(masters, net.parameters(), strict=True):
                assert parameter.grad is not None
                master.sub_(parameter.grad.float(), alpha=rate / 128)
                parameter.copy_(master)
                parameter.grad = None

    if not graph:
        for _ in range(len(found)):
            step()
        return found
    warm = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(warm)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step()
    for _ in range(STEPS):
        captured.replay()
    return found


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize(
    ("make", "form", "recompute"),
    [
        (resnet50, "fused", False), (resnet50, "fused", True), (resnet50, "both", False),
        (resnet50, CUDNN[1], False), (resnet18, CUDNN[1], False), (resnet18, CUDNN[1], True),
    ],
)  # fmt: skip
def test_fused_convolutions_learn_the_same(
    make: Callable[[], nn.Module], form: str, recompute: bool, graph: bool, taken: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Bit by bit, but for cuDNN's forms, whose sums have no order."""
    prefer(form, 0, monkeypatch)
    theirs, ours = (learned(make, on, graph, recompute) for on in (False, True))
    assert theirs.isfinite().all()
    if form in CUDNN:
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    else:
        assert torch.equal(ours, theirs)
    assert taken
    assert all(taken)


def test_a_chosen_step_with_cudnn_runs(taken: list[bool]) -> None:
    """The trial times forms on one stream."""
    switches = {"precision.amp_dtype": "fp16", "run.fused_convolutions": "cudnn"}
    losses, _, _ = trained("resnet18", 32, 32, switches)
    assert taken == []
    ours, found, _ = trained("resnet18", 32, 32, {**switches, "run.weight_stream": "on"})
    assert found.isfinite().all()
    torch.testing.assert_close(ours, losses, rtol=2e-2, atol=2e-2)
    assert taken
    assert all(taken)


def test_memory_is_that_of_a_few_maps_more() -> None:
    off, on = peak_of("resnet50", 64), peak_of("resnet50", 64, weight_stream="on")
    assert on <= 1.15 * off
