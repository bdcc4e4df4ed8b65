"""Gradients of weights on a second stream: what is launched, waited for and kept. Without a GPU a
stand-in computes at once, and shows its results late."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interpreter_run import needs_triton, run_interpreted
from models.late_stream import LateStream
from paceline.models import weight_stream
from paceline.models.alexnet import NORM_NAMES, AlexNet
from paceline.models.recompute import recompute_norms
from paceline.models.resnet import (
    BasicBlock,
    Bottleneck,
    FastResNet,
    PooledConv,
    ResidualBlock,
    ResNet,
    SmallResNet,
)
from paceline.models.weight_stream import (
    Beside,
    WeightStream,
    conv2d,
    convolved,
    use_weight_stream,
)


def weight_of(*shape: int, kind: torch.dtype = torch.float64) -> nn.Parameter:
    made = torch.randn(*shape, dtype=kind).contiguous(memory_format=torch.channels_last)
    return nn.Parameter(made)


def images(channels: int = 3, side: int = 9) -> Tensor:
    made = torch.randn(2, channels, side, side, dtype=torch.float64)
    return made.contiguous(memory_format=torch.channels_last).requires_grad_()


def backward(stream: WeightStream, loss: Tensor) -> None:
    with stream.backward():
        loss.backward()  # type: ignore[no-untyped-call]


def test_memory_is_kept_for_two_gradients_and_no_longer() -> None:
    stream, log = LateStream(), []
    seen = []
    with stream.backward():
        for number in range(4):
            x, weight = torch.randn(3), nn.Parameter(torch.randn(3))
            seen.append(weakref.ref(x))
            assert stream.takes(weight)
            stream.launch(weight, lambda x=x: x * 2, x)  # type: ignore[misc]
            del x
            assert [ref() is not None for ref in seen[-2:]] == [True] * min(2, number + 1)
            assert all(ref() is None for ref in seen[:-2])
        log += stream.noted.log
    assert log == [
        "fork", "mark 1", "fork", "mark 2", "wait 1", "fork", "mark 3", "wait 2", "fork", "mark 4",
    ]  # fmt: skip
    assert stream.noted.log[len(log) :] == ["wait 4"]
    assert all(ref() is None for ref in seen)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_gradients_are_those_of_conv2d(size: int, stride: int) -> None:
    torch.manual_seed(size)
    stream, weight, x = LateStream(), weight_of(4, 3, size, size), images()
    steps, padding = (stride, stride), (size // 2, size // 2)
    out = conv2d(x, weight, steps, padding, stream)
    theirs = F.conv2d(x, weight, None, steps, padding)
    assert out.equal(theirs)
    above = torch.randn_like(out)
    wanted = torch.autograd.grad(theirs, (x, weight), above)
    backward(stream, (out * above).sum())
    for found, expected in zip((x.grad, weight.grad), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert stream.noted.log == ["fork", "mark 1", "wait 1"]


def test_the_gradient_of_the_input_comes_first_and_autograd_copies_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, weight, x = LateStream(), weight_of(4, 3, 3, 3), images()
    out = conv2d(x, weight, (1, 1), (1, 1), stream)
    order: list[tuple[tuple[bool, bool], list[str]]] = []
    compute = weight_stream._gradients

    def noted(*given: Any) -> tuple[Any, Any]:
        order.append((given[-1], list(stream.noted.log)))
        return compute(*given)

    monkeypatch.setattr(weight_stream, "_gradients", noted)
    places: list[int] = []

    def note(parameter: Tensor) -> None:
        assert parameter.grad is not None
        (late,) = stream.noted.late.values()
        places.extend((parameter.grad.data_ptr(), late[0].data_ptr()))

    stream.hooks = 1
    weight.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
    backward(stream, out.square().sum())
    assert order == [((True, False), []), ((False, True), ["fork"])]
    assert places[0] == places[1]
    assert weight.grad is not None
    assert weight.grad.isfinite().all()


def test_a_gradient_of_another_layout_is_waited_for() -> None:
    stream, weight = LateStream(), weight_of(4, 3, 3, 3)
    with stream.backward():
        stream.launch(weight, lambda: torch.randn(4, 3, 3, 3, dtype=torch.float64))
        assert stream.noted.log == ["fork", "mark 1", "wait 1"]
        ones = weight_of(4, 3, 1, 1)
        stream.launch(ones, lambda: torch.randn(4, 3, 1, 1, dtype=torch.float64))
        assert stream.noted.log[3:] == ["fork", "mark 2"]


@pytest.mark.parametrize(("size", "waits"), [(1, ["wait 1"]), (3, ["wait 1", "wait 1"])])
def test_autograd_and_we_agree_on_layouts(
    size: int, waits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient in NCHW memory: that of a 1 × 1 weight is handed over, others are copied, and waited for
    before. Copied too early, it would stay NaN."""
    compute = weight_stream._gradients

    def in_nchw(*given: Any) -> tuple[Any, Any]:
        dx, found = compute(*given)
        return dx, None if found is None else torch.empty(found.shape, dtype=found.dtype).copy_(
            found
        )

    monkeypatch.setattr(weight_stream, "_gradients", in_nchw)
    stream, weight, x = LateStream(), weight_of(4, 3, size, size), images()
    backward(stream, conv2d(x, weight, (1, 1), (0, 0), stream).square().sum())
    assert weight.grad is not None
    assert weight.grad.isfinite().all()
    assert stream.noted.log == ["fork", "mark 1", *waits]


class FakeStream:
    """Of CUDA, in name."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.log.append(f"event of {self.name}")
        return f"an event of {self.name}"


def test_calls_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    device, current = 0, [FakeStream(log, "main")]

    @contextmanager
    def entered(stream: FakeStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "Stream", lambda number: FakeStream(log, f"side {number}"))
    stream = WeightStream()

    def compute() -> Tensor:
        log.append(f"computed on {current[-1].name}")
        return torch.randn(3)

    with stream.backward():
        for _ in range(2):
            stream.launch(nn.Parameter(torch.randn(3)), compute)
    assert log == [
        "side 0 waits for main", "computed on side 0", "event of side 0",
        "side 0 waits for main", "computed on side 0", "event of side 0",
        "main waits for an event of side 0",
    ]  # fmt: skip
    device = 1
    with stream.side.fork():
        assert current[-1].name == "side 1", "a stream for each device"


Change = Callable[[nn.Parameter], object]


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: setattr(weight, "grad", torch.ones_like(weight)),
        lambda weight: weight.register_hook(lambda grad: grad * 1),
        lambda weight: weight.register_post_accumulate_grad_hook(lambda p: None),
    ],
    ids=["has one", "hook", "hook behind"],
)
def test_a_gradient_that_autograd_reads_is_left_to_the_main_stream(change: Change) -> None:
    stream, weight, x = LateStream(), weight_of(4, 3, 3, 3), images()
    (wanted,) = torch.autograd.grad(F.conv2d(x, weight, None, 1, 1).square().sum(), weight)
    change(weight)
    before = 0 if weight.grad is None else weight.grad.clone()
    backward(stream, conv2d(x, weight, (1, 1), (1, 1), stream).square().sum())
    torch.testing.assert_close(weight.grad, wanted + before)
    assert stream.noted.log == []


def test_a_weight_of_two_convolutions_and_one_that_is_computed() -> None:
    stream, weight, x = LateStream(), weight_of(3, 3, 3, 3), images()
    plain = F.conv2d(F.conv2d(x, weight, None, 1, 1), weight, None, 1, 1)
    (wanted,) = torch.autograd.grad(plain.square().sum(), weight)
    ours = conv2d(x, weight, (1, 1), (1, 1), stream)
    backward(stream, conv2d(ours, weight, (1, 1), (1, 1), stream).square().sum())
    torch.testing.assert_close(weight.grad, wanted)
    assert stream.noted.log[:3] == ["fork", "mark 1", "wait 1"]

    weight.grad = None
    backward(stream, conv2d(x, weight * 2, (1, 1), (1, 1), stream).square().sum())
    assert weight.grad is not None
    assert stream.noted.marks == 1


def test_other_passes_use_one_stream() -> None:
    """Those outside `backward`, such as the trial that times forms; first layers; casts by autocast."""
    stream, weight, x = LateStream(), weight_of(4, 3, 3, 3, kind=torch.float32), images()
    conv2d(x.float(), weight, (1, 1), (1, 1), stream).sum().backward()  # type: ignore[no-untyped-call]
    first = conv2d(x.detach().float(), weight, (1, 1), (1, 1), stream)
    with torch.autocast("cpu", torch.bfloat16):
        cast = conv2d(x.float(), weight, (1, 1), (1, 1), stream)
    weight.grad = None
    backward(stream, first.sum() + cast.sum())
    assert stream.noted.log == []


def test_an_error_in_backward_leaves_nothing_under_way() -> None:
    stream, weight, x = LateStream(), weight_of(4, 3, 3, 3), images()

    def fail(gradient: Tensor) -> None:
        raise ValueError("from a hook")

    x.register_hook(fail)
    with pytest.raises(ValueError, match="from a hook"):
        backward(stream, conv2d(x, weight, (1, 1), (1, 1), stream).sum())
    assert stream.noted.log[-1] == "wait 1"
    assert not stream._under_way
    weight.grad = None
    assert not Beside(stream, weight).ready()


def test_a_gradient_that_fails_is_joined() -> None:
    """A capture could not end otherwise."""
    stream = LateStream()

    def compute() -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError), stream.backward():
        stream.launch(weight_of(4, 3, 3, 3), compute)
    assert stream.noted.log == ["fork", "mark 1", "wait 1"]


def test_modules_that_do_more_than_a_convolution_are_called() -> None:
    class Own(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * 2

    class Standardized(nn.Conv2d):
        def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return super()._conv_forward(x, weight - weight.mean(), bias)

    stream, x = LateStream(), images().float().detach().requires_grad_()
    hooked = nn.Conv2d(3, 3, 3, bias=False)
    replaced = nn.Conv2d(3, 3, 3, bias=False)
    replaced.forward = lambda x: x * 3  # type: ignore[method-assign, assignment]
    calls: list[str] = []
    hooked.register_forward_hook(lambda *given: calls.append("hook"))
    kinds = [
        Own(3, 3, 3, bias=False), nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3, bias=False, groups=3),
        nn.Conv2d(3, 3, 3, bias=False, dilation=2), nn.Identity(), hooked,
        Standardized(3, 3, 3, bias=False), replaced,
        nn.Conv2d(3, 3, 3, bias=False, padding="same"),
        nn.Conv2d(3, 3, 3, bias=False, padding=1, padding_mode="circular"),
    ]  # fmt: skip
    for kind in kinds:
        out = convolved(kind, x, stream)
        assert out.equal(kind(x))
        backward(stream, out.sum())
    assert calls == ["hook", "hook"]
    assert stream.noted.log == []


def alexnet() -> nn.Module:
    return AlexNet(num_classes=5, norms=NORM_NAMES)


NETS: dict[str, Callable[[], nn.Module]] = {
    "basic": lambda: ResNet(BasicBlock, (1, 1, 1, 2), num_classes=5, stem="small"),
    "bottlenecks": lambda: ResNet(Bottleneck, (1, 2, 1, 1), num_classes=5),
    "tiny": lambda: SmallResNet(num_classes=5, in_channels=3),
    "fast": lambda: FastResNet(num_classes=5, channels=(8, 12, 16, 20)),
}


@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("name", NETS)
def test_nets_have_the_same_gradients(name: str, recompute: bool) -> None:
    torch.manual_seed(0)
    ours = NETS[name]().double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for norm in ours.modules():  # no γ of 0, which would hide all gradients before it
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
    theirs = copy.deepcopy(ours)
    stream = LateStream()
    assert use_weight_stream(ours, stream) == sum(
        isinstance(part, ResidualBlock | PooledConv) for part in ours.modules()
    )
    recompute_norms(ours, recompute)
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    x = x.contiguous(memory_format=torch.channels_last)
    backward(stream, ours(x).square().sum())
    theirs(x).square().sum().backward()
    for (place, found), wanted in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        near = 1e-9 * float(wanted.grad.abs().max())
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-9, atol=near, msg=place)
    convolutions = sum(isinstance(part, nn.Conv2d) for part in ours.modules())
    assert stream.noted.marks == convolutions - 1, "all but the first"
    waits = [int(line.split()[1]) for line in stream.noted.log if line.startswith("wait")]
    assert waits == [*range(1, stream.noted.marks - 1), stream.noted.marks]
    assert all(a < b for a, b in pairwise(waits))


def test_which_models_have_modules_for_it() -> None:
    assert use_weight_stream(alexnet(), None) == 1
    assert use_weight_stream(AlexNet(num_classes=5), None) == 0
    assert use_weight_stream(nn.Conv2d(3, 3, 3), None) == 0


def test_a_copy_of_a_model_has_a_stream_of_its_own() -> None:
    net, stream = SmallResNet(), WeightStream()
    use_weight_stream(net, stream)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        (found,) = {
            part.weight_stream for part in other.modules() if hasattr(part, "weight_stream")
        }
        assert isinstance(found, WeightStream)
        assert found is not stream


@needs_triton
def test_fused_convolutions_in_tritons_interpreter() -> None:
    run_interpreted(Path(__file__).parent / "weight_stream_cases.py", at_least=11)
