"""`MicroStep`: forward and backward of one micro-batch, eager or as a CUDA graph.

Before the backward pass, the loss is divided by the number of samples in the step on all ranks and
multiplied by the loss scale of the step. The gradients, summed over ranks and micro-steps, are then
the mean gradient of all samples times the loss scale. In the last micro-step of a step, gradient
buckets can be sent during the backward pass.

`GradientSource` computes the gradients of a micro-batch: by the plain backward pass, or by the source
that the settings class of the optimizer names in `GRADIENTS`. Extensions and programs can register
sources. Only `MicroStep` is captured in CUDA graphs: code of a source never runs inside a capture.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from paceline.comm.exchange import GradientExchange
from paceline.config import RunConfig
from paceline.core.errors import PacelineError, RunError
from paceline.core.extensions import Registry
from paceline.data import Batch, BatchPlan, Normalizer, TrainBatches
from paceline.precision.policy import LossScale, Policy
from paceline.train.loss import CrossEntropy, TrainingLoss, mixed
from paceline.train.machine import run_eagerly

if TYPE_CHECKING:
    from paceline.train.step import TrainStep
    from paceline.train.strategy import MicroBatch

# Number of calls before the capture. These calls compile kernels and choose algorithms, which is
# impossible during a capture.
WARM_CALLS = 2
_LOCK_WAIT_S = 1.0


Advise = Callable[[Exception], Sequence[str]]


def no_advice(error: Exception) -> Sequence[str]:
    """Returns no remedies. This is the default for a model without an acceleration."""
    return ()


class CaptureError(RunError):
    """Raised if the capture of a CUDA graph failed. None of the captured work has run."""


class Captured:
    """A sequence of GPU work, captured once as a CUDA graph and replayed with one launch."""

    def __init__(
        self,
        function: Callable[[], None],
        *,
        enabled: bool,
        pool: Any = None,
    ) -> None:
        """Wraps a function that queues GPU work.

        Args:
            function: The work to capture. It must read and write the same memory in every call.
            enabled: False if every call must run the plain function.
            pool: Memory pool of the graph. Graphs may share a pool if they never run at the same time
                and do not pass data to each other in it. None means a new pool.
        """
        self._function = function
        self._pool = pool
        self._warm_calls_left = WARM_CALLS if enabled else -1
        self._graph: torch.cuda.CUDAGraph | None = None
        self._lock = threading.Lock()

    @property
    def replays(self) -> bool:
        """True if the next call replays the graph instead of calling the function."""
        return self._graph is not None

    @property
    def captures(self) -> bool:
        """True if the next call captures the graph, during which no work runs on the device."""
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
        """Destroys the CUDA graph. Later calls run the plain function.

        A graph with NCCL kernels keeps a reference to its communicator, and destroying a communicator
        waits for these references, so graphs must go first (pytorch/pytorch#115388). Does not wait for a
        graph that still runs: CUDA frees it when it ends.
        """
        # Another thread may call this during a replay, and CUDA graphs are not thread-safe.
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
            # The graph would create a pool of its own, whose handle is unknown if the capture fails.
            self._pool = torch.cuda.graph_pool_handle()
        try:
            # Captures calls of this thread only, because a loader's thread may copy at the same time.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._function()
        except RuntimeError as error:
            if stream is not None:
                # If the end of the capture fails, torch does not restore the stream.
                torch.cuda.set_stream(stream)
            cause = _capture_cause(error)
            if stream is not None:
                # If this fails, the next work on the device raises the reason.
                with contextlib.suppress(RuntimeError):
                    _end_failed_capture(stream, self._pool)
            reason = str(cause).splitlines()[0][:200]
            raise CaptureError(
                f"the step could not be captured as a CUDA graph ({reason})",
                "use --set run.cuda_graphs=off",
            ) from error
        return graph


def _capture_cause(error: RuntimeError) -> BaseException:
    """Returns the first error of a failed capture of a CUDA graph.

    torch raises a later error, from the end of the capture. If memory ran out or the device is lost, the
    first error is raised instead of returned.
    """
    cause: BaseException = error
    while cause.__context__ is not None and isinstance(cause.__context__, RuntimeError):
        cause = cause.__context__
    lost = isinstance(cause, torch.AcceleratorError) and "captur" not in str(cause)
    if lost or isinstance(cause, torch.OutOfMemoryError):
        raise cause
    return cause


def _end_failed_capture(stream: torch.cuda.Stream, pool: Any) -> None:
    """Restores torch's state after a failed capture of a CUDA graph.

    After the failure, the allocator still uses the memory pool of the capture, and the random
    generator refuses to draw numbers. The small successful capture here resets the generator.
    """
    torch.cuda.synchronize(stream.device)
    if pool is not None:
        with contextlib.suppress(RuntimeError, AttributeError):  # the pool's use may have ended
            torch._C._cuda_endAllocateToPool(stream.device.index, pool)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros((), device=stream.device)


# Images, labels, and a table of `Mixing` if images are mixed.
_Inputs = tuple[Tensor, Tensor, Tensor | None]


class MicroStep:
    """Runs the forward and backward pass of micro-batches.

    Attributes:
        loss: Sum over the samples of this rank's current step of the loss times `sample_weight`, on
            the device.
        sample_weight: Weight of each sample's loss in the current step, on the device.
        loss_function: The training loss.
        may_fall_back: True if a failed capture is allowed. All ranks must then agree after the first
            captures whether to use graphs.
        uncaptured: Reason why micro-steps are not captured although graphs are enabled; "" if they
            are captured.
    """

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
        model: nn.Module | None = None,
    ) -> None:
        """Sets how micro-batches are computed.

        Args:
            forward: The forward pass.
            policy: The number format of the pass.
            normalize: Turns uint8 images into inputs of the model.
            exchange: Receives the gradients of each backward pass.
            scale: The loss scale.
            smoothing: Label smoothing of the default loss, cross-entropy.
            graphs: True to capture micro-steps as CUDA graphs. A micro-step that sends buckets is
                captured only if the transport allows capture.
            must_capture: True to raise an error if a capture fails; False to continue without
                graphs.
            loss: The training loss. The default is cross-entropy.
            augment: Changes a batch of normalized images on the device.
            advise: Returns remedies for errors; see `Applied.advise`.
            model: The model that `forward` runs. A failed capture undoes changes of its buffers.
        """
        self.forward = forward
        self.advise = advise
        self._model = model
        self._policy = policy
        self._normalize = normalize
        self._exchange = exchange
        self._scale = scale
        self.loss_function = loss or CrossEntropy(smoothing)
        self._augment = augment
        self._graphs = graphs
        self.may_fall_back = graphs and not must_capture
        self.uncaptured = ""
        # On the device, because captured graphs read it.
        self.sample_weight = torch.zeros((), device=policy.device)
        self.loss = torch.zeros((), device=policy.device)
        self._captured: _CapturedMicroSteps | None = None

    def begin(self, samples: int, global_batch: int) -> None:
        """Prepares the loss and its weights for a new step.

        Args:
            samples: Number of samples in the step, on all ranks together.
            global_batch: Number of samples in a full step.
        """
        self.sample_weight.fill_(1.0 / samples)
        self._scale.begin_step(samples, global_batch)
        self.loss.zero_()

    def run(
        self, images: Tensor, labels: Tensor, *, full_size: bool, last: bool = False,
        mix: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Runs the forward and backward pass of a micro-batch and adds the gradients.

        Args:
            images: Images of the micro-batch.
            labels: Labels of the images.
            full_size: True if the micro-batch has the usual size, for which a graph is worth
                capturing.
            last: True for the last micro-batch of a step: the exchange may send full buckets.
            mix: The result of `Mixing.table`, if images are mixed. It must be given in every call or
                in none.
        """
        inputs, device = (images, labels, mix), self._policy.device
        sends = last and self._exchange.overlaps
        if not (self._graphs and full_size):
            self.drop_graphs()
        if not full_size:
            # Eager, because compilation takes a minute, and this size may occur only once in the run.
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
            self._captured.run(inputs, self._exchange, self._model, sends=sends)
        except CaptureError as error:
            if not self.may_fall_back:
                raise
            self.fall_back(error.cause)
            self._compute(sends, *_moved(inputs, device))

    def fall_back(self, reason: str) -> None:
        """Destroys the graphs and runs all later micro-steps without graphs, for the given reason."""
        if not self.uncaptured:
            self.uncaptured = reason
        self.drop_graphs()
        self._graphs = False

    def release(self) -> None:
        """Destroys the CUDA graphs. Must be called before the process groups are destroyed."""
        captured, self._captured = self._captured, None
        self._graphs = False
        if captured is not None:
            captured.release()

    def drop_graphs(self) -> None:
        """Destroys the CUDA graphs. The next micro-batch of full size captures new graphs.

        A graph holds the memory of a whole micro-batch, and a smaller batch at the end of a run needs
        nearly as much memory again.
        """
        captured, self._captured = self._captured, None
        if captured is not None:
            # The exchange of the previous step may still be running and waiting for a lost rank.
            self._exchange.group.watched(
                "the end of the previous step",
                lambda: torch.cuda.synchronize(self._policy.device),
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
        del inputs  # the first convolution may keep a copy in another layout
        part = self.loss_function.total(outputs, labels, own) * self.sample_weight
        (part * self._scale.step_value).backward()  # type: ignore[no-untyped-call]
        self.loss.add_(part.detach())
        self._exchange.gather()

    def _compute_to_end(
        self, sends: bool, images: Tensor, labels: Tensor, mix: Tensor | None
    ) -> None:
        """Computes a micro-step and waits for its gradient buckets, as a capture must before it ends."""
        self._compute(sends, images, labels, mix)
        self._exchange.join()


def _moved(inputs: _Inputs, device: torch.device) -> _Inputs:
    images, labels, mix = inputs
    return (
        images.to(device, non_blocking=True), labels.to(device, non_blocking=True),
        None if mix is None else mix.to(device, non_blocking=True),
    )  # fmt: skip


@contextlib.contextmanager
def _kept_buffers(model: nn.Module | None) -> Iterator[None]:
    """If a capture fails, undoes assignments to the model's buffers, whose tensors never got values."""
    places = [(module, dict(module._buffers)) for module in model.modules()] if model else []
    try:
        yield
    except CaptureError:
        for module, buffers in places:
            module._buffers.clear()
            module._buffers.update(buffers)
        raise


class _CapturedMicroSteps:
    """Holds two CUDA graphs of a micro-step: one that sends gradient buckets, and one that does not.

    The two graphs share one memory pool, because they never run at the same time and write their
    results into the flat gradient buffers.
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

    def run(
        self, inputs: _Inputs, exchange: GradientExchange, model: nn.Module | None, *, sends: bool
    ) -> None:
        """Runs, captures or replays one micro-step, and updates the state of the gradient exchange."""
        for place, given in zip(self._inputs, inputs, strict=True):
            if place is not None and given is not None:
                place.copy_(given, non_blocking=True)
        captured = self._captured[sends]
        if captured.replays:
            captured()
            exchange.replay(sends=sends)
        elif captured.captures:
            with exchange.capture(sends=sends), _kept_buffers(model):
                captured()
        else:
            captured()

    def release(self) -> None:
        for captured in self._captured.values():
            captured.release()


# Creates this rank's loader for a plan, starting at a step.
MakeLoader = Callable[[BatchPlan, int], TrainBatches]


class Begun(NamedTuple):
    """The result of `GradientSource.begin`.

    Attributes:
        fault: An error of this rank, which the step reports to all ranks; None if there is none.
        abandoned: True if some rank was asked to stop. In that case no rank computes the step.
    """

    fault: PacelineError | None = None
    abandoned: bool = False


class GradientSource:
    """Computes the gradients of each micro-batch, by default with one backward pass.

    Attributes:
        fixed_ranks: Reason why the number of ranks cannot change during a run; "" if it can.
        several_passes: True if `add` runs the model more than once. Gradients are then summed in fp32.
        exchanges: How often the whole gradient is summed over ranks in a step, on average.
    """

    fixed_ranks: ClassVar[str] = ""
    several_passes: ClassVar[bool] = False
    exchanges: float = 1.0

    @classmethod
    def create(cls, config: RunConfig, plan: BatchPlan, make_loader: MakeLoader) -> GradientSource:
        """Creates the gradient source of a run."""
        return cls()

    def begin(self, step: TrainStep, number: int) -> Begun:
        """Runs before step `number`. A subclass may sum gradients over ranks here."""
        return Begun()

    def add(
        self, step: TrainStep, number: int, batch: Batch, part: MicroBatch, mix: Tensor | None
    ) -> None:
        """Adds the gradients of a micro-batch to those of the step.

        The caller has seeded the random generators.

        Args:
            step: The training step.
            number: Number of the step.
            batch: Images and labels of the micro-batch.
            part: Position of the micro-batch in the step, and whether it has the full size.
            mix: The result of `Mixing.table`, if images are mixed.
        """
        step.micro.run(
            batch.images, batch.labels, full_size=part.full_size, last=part.last, mix=mix
        )

    def describe(self) -> dict[str, str]:
        """Returns lines to display at the start of the run, by name."""
        return {}


GRADIENT_SOURCES: Registry[type[GradientSource]] = Registry(
    "gradient sources", {"backward": GradientSource}
)


def source_class(config: RunConfig) -> type[GradientSource]:
    """Returns the class of the gradient source that the optimizer needs."""
    return GRADIENT_SOURCES.get(config.optim.own_optimizer.GRADIENTS, "optim.name")
