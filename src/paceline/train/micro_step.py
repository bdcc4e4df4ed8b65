"""`MicroStep`: forward and backward of one micro-batch, eager or as a CUDA graph.

The loss is divided by the step's samples, those of all ranks, and multiplied by the step's loss scale
before the backward pass, so the sum of the gradients over ranks and micro-steps is their average, times
that scale. In the last micro-step of a step an exchange that overlaps sends buckets while backward goes
on. `step_error` turns what a pass raises into an error for the user.

`GradientSource` says how the gradients of a micro-batch come about: by the plain backward pass, or as the
settings class of the optimizer says in `GRADIENTS`, by a source that an extension lists or a program
registers. Only `MicroStep` is captured in CUDA graphs: code of a source never runs inside of a capture.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from paceline.comm.exchange import GradientExchange
from paceline.config import RunConfig
from paceline.core.errors import PacelineError, RunError, compile_reason, is_compile_error
from paceline.core.extensions import Registry
from paceline.core.imports import first_line
from paceline.data import Batch, BatchPlan, Normalizer, TrainBatches
from paceline.precision.policy import LossScale, Policy
from paceline.train.loss import CrossEntropy, TrainingLoss, mixed
from paceline.train.machine import out_of_memory, run_eagerly

if TYPE_CHECKING:
    from paceline.train.step import TrainStep
    from paceline.train.strategy import MicroBatch

# The first calls run the function itself: they compile kernels and choose algorithms, which a capture
# cannot do.
WARM_CALLS = 2
_LOCK_WAIT_S = 1.0


Advise = Callable[[Exception], Sequence[str]]


def no_advice(error: Exception) -> Sequence[str]:
    """What an acceleration knows about an error of a plain model."""
    return ()


class CaptureError(RunError):
    """Work that cannot be captured as a CUDA graph; nothing of it has run."""


class Captured:
    """A sequence of GPU work, captured once as a CUDA graph and replayed with one launch.

    The function takes no arguments and reads and writes fixed memory. With `enabled` False it is called
    as it is. Graphs that never run at the same time, and pass
    each other no data in their own memory, may share a memory `pool`."""

    def __init__(
        self,
        function: Callable[[], None],
        *,
        enabled: bool,
        pool: Any = None,
    ) -> None:
        self._function = function
        self._pool = pool
        self._warm_calls_left = WARM_CALLS if enabled else -1
        self._graph: torch.cuda.CUDAGraph | None = None
        self._lock = threading.Lock()

    @property
    def replays(self) -> bool:
        """Whether the next call runs no Python of the function."""
        return self._graph is not None

    @property
    def captures(self) -> bool:
        """Whether the next call captures, so that nothing runs on the device until the capture ends."""
        return self._graph is None and self._warm_calls_left == 0

    def __call__(self) -> None:
        if self._graph is not None or self._warm_calls_left == 0:
            with self._lock:
                self._graph = self._graph or self._capture()
                self._graph.replay()
        else:
            self._warm_calls_left -= 1 if self._warm_calls_left > 0 else 0
            self._function()

    def release(self) -> None:
        """Destroys the CUDA graph; later calls run the plain function.

        A graph that holds NCCL kernels keeps a reference to its communicator, and destroying a
        communicator waits for these references: graphs go first (pytorch/pytorch#115388). Does not wait
        for a graph that still runs: CUDA frees it when it ends.
        """
        # Another thread may release while this rank's own replays: CUDA graphs are not thread-safe.
        if not self._lock.acquire(timeout=_LOCK_WAIT_S):
            return
        try:
            if self._graph is not None:
                self._graph.reset()
                self._graph = None
            self._warm_calls_left = -1
        finally:
            self._lock.release()

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        if stream is not None and self._pool is None:
            # The graph would make one, whose handle is not known where the capture fails.
            self._pool = torch.cuda.graph_pool_handle()
        try:
            # Only this thread's calls are captured: a loader's thread may copy meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._function()
        except RuntimeError as error:
            if stream is not None:
                # Where the end of the capture fails, torch does not leave its own.
                torch.cuda.set_stream(stream)
            cause = _capture_cause(error)
            if stream is not None:
                # If this fails, so does the next work on the device, with its own reason.
                with contextlib.suppress(RuntimeError):
                    _end_failed_capture(stream, self._pool)
            reason = str(cause).splitlines()[0][:200]
            raise CaptureError(
                f"the step could not be captured as a CUDA graph ({reason})",
                "use --set run.cuda_graphs=off",
            ) from error
        return graph


def _capture_cause(error: RuntimeError) -> BaseException:
    """What made a capture fail: where the end of the capture fails too, torch raises that. Raises the
    cause itself where it means that memory ran out or that the device is lost."""
    cause: BaseException = error
    while cause.__context__ is not None and isinstance(cause.__context__, RuntimeError):
        cause = cause.__context__
    lost = isinstance(cause, torch.AcceleratorError) and "captur" not in str(cause)
    if lost or isinstance(cause, torch.OutOfMemoryError):
        raise cause
    return cause


def _end_failed_capture(stream: torch.cuda.Stream, pool: Any) -> None:
    """Undoes what torch leaves behind where the end of a capture fails: an allocator that still serves
    the capture's pool, and a random generator that refuses to draw outside of a capture. A capture that
    succeeds resets the generator."""
    torch.cuda.synchronize(stream.device)
    if pool is not None:
        with contextlib.suppress(RuntimeError, AttributeError):  # it has ended
            torch._C._cuda_endAllocateToPool(stream.device.index, pool)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros((), device=stream.device)


# Images, labels, and a table of `Mixing` where images are mixed.
_Inputs = tuple[Tensor, Tensor, Tensor | None]


class MicroStep:
    """`forward` is the model, compiled or not. Adds to `loss` on the device."""

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        policy: Policy,
        normalize: Normalizer,
        exchange: GradientExchange,
        scale: LossScale,
        smoothing: float,
        *,
        graphs: bool = False,
        must_capture: bool = True,
        loss: TrainingLoss | None = None,
        augment: Callable[[Tensor], Tensor] | None = None,
        advise: Advise = no_advice,
    ) -> None:
        """`graphs`: capture micro-steps; one that sends buckets only where the transport allows it.
        `must_capture`: raise where that fails, instead of going on without. Without a `loss` it is
        cross-entropy with `smoothing`. `augment` changes the normalized images. `advise`: what
        to do about errors, see `Applied.advise`."""
        self.forward = forward
        self.advise = advise
        self._policy = policy
        self._normalize = normalize
        self._exchange = exchange
        self._scale = scale
        self.loss_function = loss or CrossEntropy(smoothing)
        self._augment = augment
        self._graphs = graphs
        # Whether ranks have to agree, after the first captures, that all of them go on with graphs.
        self.may_fall_back = graphs and not must_capture
        # Why micro-steps are not captured although they should be.
        self.uncaptured = ""
        # What a sample's loss is multiplied by, in captured graphs too.
        self.share = torch.zeros((), device=policy.device)
        self.loss = torch.zeros((), device=policy.device)
        self._captured: _CapturedMicroSteps | None = None

    def begin(self, samples: int, global_batch: int) -> None:
        """Before the first micro-batch of a step over `samples` samples, those of all ranks; a full
        step has `global_batch`."""
        self.share.fill_(1.0 / samples)
        self._scale.begin_step(samples, global_batch)
        self.loss.zero_()

    def run(
        self, images: Tensor, labels: Tensor, *, usual: bool, last: bool = False,
        mix: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`usual`: the size that nearly every micro-batch has, worth capturing. `last` of its step: the
        exchange may send full buckets. `mix` is a table of `Mixing`, always or never."""
        inputs, device = (images, labels, mix), self._policy.device
        sends = last and self._exchange.overlaps
        if not (self._graphs and usual):
            self.drop_graphs()
        if not usual:
            # Not compiled: that takes a minute for a size that comes once, such as the run's last.
            with run_eagerly():
                self._compute(sends, *_moved(inputs, device))
            return
        if not self._graphs or (sends and not self._exchange.transport.capturable):
            self._compute(sends, *_moved(inputs, device))
            return
        if self._captured is None:
            self._normalize.prepare(device)
            self._captured = _CapturedMicroSteps(self._compute_to_end, inputs, device)
        try:
            self._captured.run(inputs, self._exchange, sends=sends)
        except CaptureError as error:
            if not self.may_fall_back:
                raise
            self.fall_back(error.cause)
            self._compute(sends, *_moved(inputs, device))

    def fall_back(self, reason: str) -> None:
        """Micro-steps are not captured from now on."""
        if not self.uncaptured:
            self.uncaptured = reason
        self.drop_graphs()
        self._graphs = False

    def release(self) -> None:
        """Destroys the CUDA graphs, before the process groups whose collectives they hold."""
        captured, self._captured = self._captured, None
        self._graphs = False
        if captured is not None:
            captured.release()

    def drop_graphs(self) -> None:
        """Destroys the CUDA graphs; the next usual micro-batch, which may have another size, begins new
        ones. A graph holds the memory of a whole micro-batch for good, and a short batch, at the end of a
        run, needs nearly as much once more."""
        captured, self._captured = self._captured, None
        if captured is not None:
            # The exchange of the step before may still be under way, and wait for a lost rank.
            self._exchange.group.watched(
                "the end of the step before", lambda: torch.cuda.synchronize(self._policy.device)
            )
            captured.release()
            torch.cuda.empty_cache()

    def _compute(self, sends: bool, images: Tensor, labels: Tensor, mix: Tensor | None) -> None:
        own: Tensor | None = None
        if sends:
            self._exchange.arm()
        with self._policy.compute():
            inputs = self._normalize(images, self._policy.device)
            if self._augment is not None:
                inputs = self._augment(inputs)
            if mix is not None:
                inputs, own = mixed(inputs, mix)
            outputs = self.forward(inputs)
        del inputs  # the first convolution may keep a form of its own
        part = self.loss_function.total(outputs, labels, own) * self.share
        (part * self._scale.step_value).backward()  # type: ignore[no-untyped-call]
        self.loss.add_(part.detach())
        self._exchange.gather()

    def _compute_to_end(
        self, sends: bool, images: Tensor, labels: Tensor, mix: Tensor | None
    ) -> None:
        """A capture must not end before the buckets that it sends are complete."""
        self._compute(sends, images, labels, mix)
        self._exchange.join()


def _moved(inputs: _Inputs, device: torch.device) -> _Inputs:
    images, labels, mix = inputs
    return (
        images.to(device, non_blocking=True), labels.to(device, non_blocking=True),
        None if mix is None else mix.to(device, non_blocking=True),
    )  # fmt: skip


class _CapturedMicroSteps:
    """The CUDA graphs of a micro-step, one that sends buckets and one that does not, with their inputs.

    Only one runs at a time, and its results are in the exchange's buffers, so they share one pool.
    """

    def __init__(
        self,
        compute: Callable[[bool, Tensor, Tensor, Tensor | None], None],
        inputs: _Inputs,
        device: torch.device,
    ) -> None:
        images, labels, mix = inputs
        self._inputs: _Inputs = (
            torch.empty_like(images, device=device), torch.empty_like(labels, device=device),
            None if mix is None else torch.empty_like(mix, device=device),
        )  # fmt: skip
        pool = torch.cuda.graph_pool_handle()
        self._captured = {
            sends: Captured(partial(compute, sends, *self._inputs), enabled=True, pool=pool)
            for sends in (False, True)
        }

    def run(self, inputs: _Inputs, exchange: GradientExchange, *, sends: bool) -> None:
        """Warms up, captures or replays, and keeps the exchange's state in step."""
        for place, given in zip(self._inputs, inputs, strict=True):
            if place is not None and given is not None:
                place.copy_(given, non_blocking=True)
        captured = self._captured[sends]
        if captured.replays:
            captured()
            exchange.replay(sends=sends)
        elif captured.captures:
            with exchange.capture(sends=sends):
                captured()
        else:
            captured()

    def release(self) -> None:
        for captured in self._captured.values():
            captured.release()


# Creates this rank's loader of a plan, from a step on.
MakeLoader = Callable[[BatchPlan, int], TrainBatches]


class Begun(NamedTuple):
    """What became of the start of a step.

    Attributes:
        fault: The error of this rank, which the step reports to all ranks.
        abandoned: A rank was asked to stop, so that no rank computes the step.
    """

    fault: PacelineError | None = None
    abandoned: bool = False


class GradientSource:
    """The plain backward pass.

    Attributes:
        several_passes: `add` runs the model more than once, so that gradients add up in fp32.
        exchanges: All-reduces of whole gradients a step, on average.
    """

    several_passes: ClassVar[bool] = False
    exchanges: float = 1.0

    @classmethod
    def create(cls, config: RunConfig, plan: BatchPlan, make_loader: MakeLoader) -> GradientSource:
        """Creates the source of a run."""
        return cls()

    def begin(self, step: TrainStep, number: int) -> Begun:
        """Called before the first micro-batch of step `number`. May exchange gradients."""
        return Begun()

    def add(
        self, step: TrainStep, number: int, batch: Batch, part: MicroBatch, mix: Tensor | None
    ) -> None:
        """Adds the gradients of a micro-batch of step `number`; random generators have been seeded."""
        step.micro.run(batch.images, batch.labels, usual=part.usual, last=part.last, mix=mix)

    def describe(self) -> dict[str, str]:
        """Returns lines for the start of the run."""
        return {}


GRADIENT_SOURCES: Registry[type[GradientSource]] = Registry(
    "gradient sources", {"backward": GradientSource}
)


def source_class(config: RunConfig) -> type[GradientSource]:
    """Returns the gradient source that the optimizer needs."""
    return GRADIENT_SOURCES.get(config.optim.own_optimizer.GRADIENTS, "optim.name")


def step_error(
    error: Exception, step: int, micro_batch: int, *, foreign: bool = False,
    advise: Advise = no_advice,
) -> PacelineError | None:  # fmt: skip
    """The error, with cause and remedy, for an exception out of a forward or backward pass; None
    where it is a defect of the program and must keep its traceback. With a `foreign` model, all
    exceptions count as the model's. `advise` is of the acceleration that computes the pass."""
    if isinstance(error, CaptureError):
        return CaptureError(error.cause, _first_of(advise(error), error.remedy))
    if isinstance(error, PacelineError):
        return error
    if is_compile_error(error):
        return _compile_error(error, advise(error))
    known = _memory_error(error, step, micro_batch, advise) or _single_value_error(error, step)
    if known is None and foreign and not isinstance(error, torch.AcceleratorError):
        return RunError(
            f"the model's forward or backward failed at step {step + 1} on {micro_batch} images: "
            f"{first_line(error)}",
            "check the model's code",
        )
    return known


def _first_of(advice: Sequence[str], remedy: str) -> str:
    return "; if that does not help, ".join(filter(None, (*advice, remedy)))


def _memory_error(error: Exception, step: int, size: int, advise: Advise) -> RunError | None:
    remedies = ["free memory, or choose a smaller model"]
    if size > 1:
        smaller = f"use a smaller one, such as --batch-size {size // 2}"
        remedies = [f"{smaller}; the global batch and the result stay the same"]
    where = f"at step {step + 1} with a batch size of {size} a process"
    if out_of_memory(error, where, "") is None:
        return None
    return out_of_memory(error, where, "; ".join([*remedies, *advise(error)]))


def _single_value_error(error: Exception, step: int) -> RunError | None:
    """Batch norm has no variance to take of one sample with 1 × 1 maps."""
    if "more than 1 value per channel" not in str(error):
        return None
    return RunError(
        f"a micro-batch of one sample at step {step + 1} leaves batch norm a single value",
        "choose a --global-batch-size or --epochs with which the last batch has more samples, or a "
        "larger --batch-size",
    )


def _compile_error(error: Exception, advice: Sequence[str]) -> RunError:
    reason = compile_reason(error)
    if type(error).__module__.startswith("triton"):
        remedy = _first_of(advice, "use --set optim.fused=foreach")
        return RunError(f"Triton could not build a kernel ({reason})", remedy)
    return RunError(f"torch.compile failed ({reason})", _first_of(advice, "check the model's code"))
