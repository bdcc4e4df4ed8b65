"""Gradients of convolution weights on a second CUDA stream, beside the rest of the backward pass.

Backward goes on with the gradient of a convolution's input; nothing reads that of its weight before the
pass ends, or before a bucket of gradients is sent. So a convolution computes the first one on the main
stream and then launches the second one here, where it shares the GPU with the norms' passes over memory
that follow. The results have the same bits.

A `WeightStream` belongs to one run: `use_weight_stream` gives it to the modules of a model, and whoever
runs a backward pass inside `WeightStream.backward` gets gradients that are complete afterwards. Any other
backward pass of that model computes everything on its own stream. The model must not use a weight in
other operators: autograd would add their gradients without waiting.

Autograd knows nothing of the second stream. It must not touch the gradient on the main one, which
`Beside.ready` and `WeightStream.launch` see to: autograd hands a gradient over as it is if the parameter
has none yet, if no one else refers to it, and if its memory layout is the parameter's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from paceline.models.recompute import switch_forms
from paceline.models.stem import has_hooks, is_plain

# Gradients under way. What they read is kept alive until the main stream has waited for them, so more of
# them need more memory.
WINDOW = 2


class SideStream(Protocol):
    """What is asked of the second stream; tests put another one in the place of CUDA's."""

    def serves(self, x: Tensor) -> bool:
        """Whether it can compute with `x`."""

    def fork(self) -> AbstractContextManager[None]:
        """Work inside runs on the second stream, after all that the current one has been given."""

    def mark(self) -> Any:
        """The end of what the second stream has been given."""

    def wait(self, mark: Any) -> None:
        """Makes the current stream wait for `mark`, not the host."""


class CudaSideStream:
    """A stream for each device. All of it may be captured in a CUDA graph."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}

    def serves(self, x: Tensor) -> bool:
        return x.is_cuda

    @contextmanager
    def fork(self) -> Iterator[None]:
        stream = self._stream()
        # Also for memory: gradients lie in that of the second stream, and it gets them back after the
        # main one has been given their last use.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._stream().record_event()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(mark)

    def _stream(self) -> torch.cuda.Stream:
        device = torch.cuda.current_device()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


class WeightStream:
    """The second stream of a run, and what is under way on it.

    `hooks`: how many hooks on a parameter's gradient call `wait` before they read it. A parameter with
    more, or with any that changes its gradient, is left to the main stream.
    """

    def __init__(self, side: SideStream | None = None) -> None:
        self.side = side or CudaSideStream()
        self.hooks = 0
        self._active = False
        # Marks, each with the tensors that the work before it reads. Instead of `record_stream`, which in
        # a capture would keep their memory to the end of it.
        self._under_way: deque[tuple[Any, tuple[Tensor, ...]]] = deque()
        self._launched: set[int] = set()

    def __reduce__(self) -> Any:
        """A copy of a model has one of its own, which no one switches on."""
        return WeightStream, ()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass, whose gradients are complete afterwards."""
        self._active = True
        self._launched.clear()
        try:
            yield
        finally:
            self._active = False
            self.join()

    def takes(self, weight: Tensor) -> bool:
        """Whether autograd only hands a gradient of `weight` over: no sum and no hook reads it."""
        if not self._active:
            return False
        if id(weight) in self._launched:
            # Autograd adds the gradients of several uses on the main stream.
            self.wait()
            return False
        readers = len(weight._post_accumulate_grad_hooks or ())
        return (
            weight.is_leaf
            and weight.grad is None
            and not weight._backward_hooks
            and readers <= self.hooks
        )

    def launch(self, weight: Tensor, compute: Callable[[], Tensor], *uses: Tensor) -> Tensor:
        """The gradient of `weight`, which `takes` has said yes to. `uses`: tensors that `compute` reads,
        apart from parameters."""
        while len(self._under_way) >= WINDOW:
            self.side.wait(self._under_way[0][0])
            self._under_way.popleft()
        try:
            with self.side.fork():
                found = compute()
        finally:
            # Without a reference to `found`: autograd would copy it, and not wait before. Also after an
            # error: a capture cannot end while a stream is not joined.
            self._under_way.append((self.side.mark(), uses))
        self._launched.add(id(weight))
        if not _same_layout(found, weight):
            self.wait()  # autograd copies it
        return found

    def wait(self) -> None:
        """Makes the current stream wait for all gradients. Keeps what they read: the stream of a hook
        need not be the one that this memory belongs to."""
        if self._under_way:
            self.side.wait(self._under_way[-1][0])

    def join(self) -> None:
        """`wait` by the main stream."""
        try:
            self.wait()
        finally:
            self._under_way.clear()


def _same_layout(found: Tensor, weight: Tensor) -> bool:
    """Whether autograd takes `found` as it is. Strides of dimensions of size 1 do not matter to it."""
    return found.dtype == weight.dtype and all(
        own == wanted or size == 1
        for own, wanted, size in zip(found.stride(), weight.stride(), weight.shape, strict=True)
    )


@dataclass(frozen=True)
class Beside:
    """How a convolution of a parameter `weight` launches its gradient."""

    stream: WeightStream
    weight: Tensor

    def ready(self) -> bool:
        return self.stream.takes(self.weight)

    def __call__(self, compute: Callable[[], Tensor], *uses: Tensor) -> Tensor:
        return self.stream.launch(self.weight, compute, *uses)


def beside(stream: WeightStream | None, weight: Tensor) -> Beside | None:
    """For a convolution that does without `stream` where it cannot compute with `weight`."""
    return None if stream is None or not stream.side.serves(weight) else Beside(stream, weight)


def use_weight_stream(model: nn.Module, stream: WeightStream | None) -> int:
    """Gives `stream`, or none, to every module of `model` that can use it; returns their number."""
    return switch_forms(model, "weight_stream", stream)


def convolved(convolution: nn.Module, x: Tensor, stream: WeightStream) -> Tensor:
    """convolution(x)."""
    if is_plain(convolution) and convolution.bias is None and not has_hooks(convolution):
        padding = convolution.padding
        assert not isinstance(padding, str)
        return conv2d(x, convolution.weight, convolution.stride, padding, stream)
    maps: Tensor = convolution(x)
    return maps


def conv2d(
    x: Tensor, weight: Tensor, stride: tuple[int, ...], padding: tuple[int, ...],
    stream: WeightStream | None,
) -> Tensor:  # fmt: skip
    """`F.conv2d` without bias; the weight's gradient may be launched on `stream`. That of the first layer
    is not: it has no gradient of an input to go before it."""
    launcher = beside(stream, weight)
    if launcher is None or not (x.requires_grad and _computes_in(x, weight)):
        return F.conv2d(x, weight, None, stride, padding)
    out: Tensor = _Convolution.apply(  # type: ignore[no-untyped-call]
        x, weight, stride, padding, launcher
    )
    return out


def _computes_in(x: Tensor, weight: Tensor) -> bool:
    """Whether the convolution computes in the format of both, without a cast by autocast."""
    kind = x.device.type
    cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != x.dtype
    return x.dtype == weight.dtype and not cast and torch.is_grad_enabled()


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, stride: tuple[int, ...], padding: tuple[int, ...],
        beside: Beside,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding, ctx.beside = stride, padding, beside
        return F.conv2d(x, weight, None, stride, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # A map that was not stored is computed here, on the main stream.
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        compute = partial(_gradients, gradient, x, weight, ctx.stride, ctx.padding)
        if all(wanted) and ctx.beside.ready():
            dx, _ = compute((True, False))
            found = ctx.beside(lambda: compute((False, True))[1], gradient, x)
        else:
            dx, found = compute(wanted)
        return dx, found, None, None, None


def _gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: tuple[int, ...], padding: tuple[int, ...],
    wanted: tuple[bool, bool],
) -> tuple[Any, Any]:  # fmt: skip
    dx, found, _ = torch.ops.aten.convolution_backward(
        gradient, x, weight, None, stride, padding, (1, 1), False, (0, 0), 1, (*wanted, False)
    )
    return dx, found
