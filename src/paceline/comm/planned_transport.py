"""Transports with their own process groups, for plans of several buckets, algorithms or formats.

If all algorithms of the plan are `native`, `NativeTransport` runs NCCL's all-reduce on NCCL's stream.
Otherwise `ThreadTransport` sums each bucket on the communication thread (`CommThread`):
`PlannedAllReduce` casts to the wire format (`WireFormat`), sums by the bucket's algorithm, and casts
back. The sums are bit-identical on all ranks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from paceline.comm.collectives import backend_reason
from paceline.comm.executor import Executor, Staging, check_buffer
from paceline.comm.group import Group
from paceline.comm.memory import Memory
from paceline.comm.process_groups import ProcessGroups
from paceline.comm.settings import BACKEND_GRACE_S, CommSettings
from paceline.comm.transport import Notify, Piece, Transport, Wait
from paceline.core.errors import CommError, ConfigError, nearest
from paceline.core.extensions import load_part
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.wires import SHORT_WIRES, wire_format

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
WIRES = tuple(_DTYPES)


@dataclass(frozen=True)
class WireFormat:
    """The number format in which a gradient buffer is sent, after a division by 2^`shift`.

    The largest fp16 value is 65504, which a sum over many ranks can exceed. For such sums each rank
    divides by 2^`shift`, which is at least the number of ranks, and the sum is multiplied by 2^`shift`.
    Both operations are exact, except where the division underflows in fp16.
    """

    name: str = "float32"
    shift: int = 0

    @classmethod
    def named(
        cls, name: str, world_size: int = 1, *, scaled: bool | None = None, field: str = "comm.wire"
    ) -> Self:
        """Returns the wire format `name`, for a sum over `world_size` ranks.

        Args:
            name: A format that every algorithm can sum.
            world_size: The number of ranks.
            scaled: Divide before the sum to prevent overflow. None means True for fp16 only.
            field: The setting or argument that contains the name, for messages.
        """
        full = SHORT_WIRES.get(name, name)
        if full not in _DTYPES:
            problem = "is not a format in which every algorithm can sum"
            raise ConfigError(field, name, problem, nearest(str(name), WIRES))
        wanted = full == "float16" if scaled is None else scaled
        # 2^shift ≥ p: p numbers of up to 65504 / 2^shift cannot add up to more than 65504.
        return cls(full, (world_size - 1).bit_length() if wanted else 0)

    @classmethod
    def for_tensor(cls, tensor: Tensor, name: str) -> Self:
        """Returns the format `name` without scaling; `auto` keeps the tensor's dtype.

        Use this if each rank's values are already divided, so that their sum is a mean.
        """
        return cls.named(str(tensor.dtype).removeprefix("torch.") if name == "auto" else name,
                         scaled=False)  # fmt: skip

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.name]

    @property
    def unit_roundoff(self) -> float:
        """Returns the largest relative error of a rounding to this format."""
        return float(torch.finfo(self.dtype).eps) / 2

    def encode(self, buffer: Tensor, wire: Tensor) -> None:
        """Writes `buffer` · 2^-shift, rounded once, to `wire`, which can be the same tensor."""
        if self.shift:
            torch.mul(buffer, 2.0**-self.shift, out=wire)
        elif wire is not buffer:
            wire.copy_(buffer)

    def decode(self, wire: Tensor, buffer: Tensor, divide_by: int = 1) -> None:
        """Writes `wire` · 2^shift / `divide_by` to `buffer`; exact if it divides by a power of two."""
        if wire is not buffer:
            buffer.copy_(wire)
        factor = 2.0**self.shift
        if divide_by & (divide_by - 1):
            # One rounding rather than two; the scale itself is exact.
            buffer.mul_(factor / divide_by) if self.shift else buffer.div_(divide_by)
        elif factor != divide_by:
            buffer.mul_(factor / divide_by)


_END_WAIT_S = 5.0


@dataclass
class _Job:
    run: Callable[[], Tensor]
    future: Future[Any]
    device: torch.device
    ready: torch.cuda.Event | None


class CommThread:
    """The one thread of a process that runs collectives during the backward pass, in order of submission.

    `submit` never waits. After a job has failed, ranks might run different jobs, so every later job fails
    with the error of the failed job. The thread starts with the first job. It is a daemon thread, so that
    a stuck collective cannot keep the process alive.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # The error of the first job that failed.
        self.failure: BaseException | None = None
        self._closed = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def submit(self, run: Callable[[], Tensor], device: torch.device) -> Future[Any]:
        """Runs `run` after all earlier jobs. The future holds its result or its error."""
        if self._closed:
            raise CommError("the communication thread has ended", "submit before close()")
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="paceline-comm", daemon=True)
            self._thread.start()
        ready = None
        if device.type == "cuda":
            # What the caller's stream still computes must be complete before the job reads it.
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(device))
        future: Future[Any] = Future(devices=[device] if ready else None)
        self._jobs.put(_Job(run, future, device, ready))
        # An error must be raised in a callback: the C++ side of DDP sees it only from there.
        return future.then(_value)

    def close(self, *, wait: bool = True) -> None:
        """Runs all submitted jobs, then ends the thread. With `wait`, waits a few seconds at most."""
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_END_WAIT_S if wait else 0.0)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.ready is None:
                job.future.set_result(self._outcome(job))
                continue
            stream = self._stream(job.device)
            with torch.cuda.device(job.device), torch.cuda.stream(stream):
                stream.wait_event(job.ready)
                # The future records this stream: a wait for the future waits for the stream too.
                job.future.set_result(self._outcome(job))

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        """Returns the side stream of a device, on which all its exchanges run in order."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _outcome(self, job: _Job) -> Tensor | BaseException:
        if self.failure is None:
            try:
                return job.run()
            except Exception as error:  # noqa: BLE001  (raised where the future is read)
                self.failure = error
        return self.failure


def _value(future: Future[Any]) -> Tensor:
    outcome = future.value()
    if isinstance(outcome, BaseException):
        raise outcome
    assert isinstance(outcome, Tensor)
    return outcome


class WireCarrier(Protocol):
    """The protocol of an all-reduce that belongs to a wire format, for formats that need their own."""

    # The state that the format keeps between steps. A carrier without this attribute keeps no state.
    memory: Memory | None = None

    def run(self, buffer: Tensor, wire: str) -> None:
        """Replaces `buffer`, of any number format, by its sum over ranks.

        Every rank calls this with the same buffers in the same order.
        """


def _create_carriers(
    wires: Collection[str], groups: ProcessGroups, staging: Staging, settings: CommSettings | None
) -> dict[str, WireCarrier]:
    """Creates the all-reduces of wire formats that have their own, by format.

    Formats with the same `Wire.create` share one.

    Only one of these all-reduces may keep state between steps (`Memory`).
    """
    makers: dict[Any, list[str]] = {}
    for wire in sorted(wires):
        if (format_ := wire_format(wire)).algorithm:
            makers.setdefault(format_.create, []).append(wire)
    carriers: dict[str, WireCarrier] = {}
    for place, names in makers.items():
        create = load_part(place, "comm.wire", names[0]) if isinstance(place, str) else place
        carriers |= dict.fromkeys(names, create(groups, staging, settings, names))
    if len({id(memory) for memory in _memories(carriers)}) > 1:
        raise ConfigError(
            "comm.plan", None, f"has buckets in {', '.join(carriers)}, of which only one may keep state",
            "use a plan with only one of these formats",
        )  # fmt: skip
    return carriers


def _memories(carriers: Mapping[str, WireCarrier]) -> Iterator[Memory]:
    for carrier in carriers.values():
        if (memory := getattr(carrier, "memory", None)) is not None:
            yield memory


class PlannedAllReduce:
    """Sums buffers over ranks, by a given algorithm and in a given wire format.

    The sum runs in the caller's thread or on the communication thread. Every rank passes buffers of
    the same sizes in the same order. If an all-reduce on the communication thread fails, its future
    and all later futures raise a `CommError`. The timeout is the timeout of the process groups.

    Args:
        groups: The process groups.
        wires: The wire formats of the plan.
        settings: Settings of formats that keep state between steps. Without settings, no format
            keeps state.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        wires: Collection[str] = (),
        settings: CommSettings | None = None,
    ) -> None:
        self.groups = groups
        self._executor = Executor(groups)
        self.staging = self._executor.staging
        self._carriers = _create_carriers(wires, groups, self.staging, settings)
        self.thread = CommThread()

    @property
    def memory(self) -> Memory | None:
        """Returns the state that the wire formats keep between steps, or None."""
        return next(_memories(self._carriers), None)

    def prepare(self, algorithm: str) -> None:
        """Opens the connections that the algorithm needs. All ranks call this at the same point."""
        self._executor.prepare(algorithm)

    def carry(self, buffer: Tensor, algorithm: str, wire: str) -> None:
        """Sums `buffer` over ranks, in this thread. The wire format `auto` means the dtype of `buffer`.

        The sum must not overflow the format. If `buffer` is already divided by the number of ranks,
        the sum cannot overflow.
        """
        if (carrier := self._carriers.get(wire)) is not None:
            check_buffer(buffer)
            self._guarded(algorithm, buffer, lambda: carrier.run(buffer, wire))
        else:
            self.run(buffer, algorithm, WireFormat.for_tensor(buffer, wire))

    def close(self) -> None:
        """Ends the communication thread and leaves its process groups."""
        self.thread.close()
        self.groups.close()

    def run(self, buffer: Tensor, algorithm: str, wire: WireFormat, divide_by: int = 1) -> None:
        """Sums `buffer` over ranks, in this thread, and divides the sum by `divide_by`."""
        check_buffer(buffer)
        staging = self.staging
        travelling = buffer
        if wire.dtype != buffer.dtype:
            travelling = staging.take("wire", buffer.numel(), wire.dtype, buffer.device)
        wire.encode(buffer, travelling)
        # Gloo reads and writes memory of the host only.
        if buffer.is_cuda and self.groups.backend == "gloo":
            cpu = torch.device("cpu")
            host = staging.take("host", buffer.numel(), wire.dtype, cpu, pinned=True)
            host.copy_(travelling)
            self._all_reduce(algorithm, host)
            travelling.copy_(host)
        else:
            self._all_reduce(algorithm, travelling)
        wire.decode(travelling, buffer, divide_by)

    def _all_reduce(self, algorithm: str, buffer: Tensor) -> None:
        self._guarded(algorithm, buffer, lambda: self._executor.all_reduce(buffer, algorithm))

    def _guarded(self, algorithm: str, buffer: Tensor, reduce: Callable[[], None]) -> None:
        """Calls `reduce`, and turns a backend's error into a CommError that names the all-reduce."""
        try:
            reduce()
        except torch.AcceleratorError:
            raise  # this rank's own device failed
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise  # it concerns this rank only
            raise CommError(
                f"{algorithm} all-reduce of {buffer.nbytes} bytes broke on rank "
                f"{self.groups.rank} ({backend_reason(error)})",
                f"a rank has ended or is {self.groups.timeout_s:g} s late; look into the ranks' logs",
            ) from error


class NativeTransport(Transport):
    """Sums buckets with NCCL's all-reduce on NCCL's stream, concurrently with the backward pass.

    Only the CUDA stream waits for the sums, not the host, so a CUDA graph can capture both the all-reduce
    and the wait. The all-reduces use a separate process group, so that their order is independent of
    collectives of the default group.
    """

    overlaps = True
    capturable = True

    def __init__(self, group: Group, groups: ProcessGroups) -> None:
        self._group = group
        self._groups = groups
        # Several messages are sent concurrently, so each message has its own memory in the wire format.
        self._wires: dict[tuple[int, int], Tensor] = {}

    def send(self, pieces: Sequence[Piece], begun: Notify, ended: Notify) -> Wait:
        begun()
        under_way = [self._start(piece) for piece in pieces]

        def wait() -> None:
            for work, travelling, piece in under_way:
                if work is not None:
                    self._group.watched("all-reduce", work.wait)
                if travelling is not piece.tensor:
                    piece.tensor.copy_(travelling)
            ended()

        return wait

    def _start(self, piece: Piece) -> tuple[Any, Tensor, Piece]:
        travelling = piece.tensor
        dtype = WireFormat.for_tensor(piece.tensor, piece.wire).dtype
        if dtype != travelling.dtype:
            travelling = self._wire(piece.tensor, dtype)
            travelling.copy_(piece.tensor)
        if self._groups.world is None or not travelling.numel():
            return None, travelling, piece
        work: Any = self._group.watched(
            "all-reduce",
            lambda: dist.all_reduce(travelling, group=self._groups.world, async_op=True),
        )
        return work, travelling, piece

    def _wire(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        key = (tensor.data_ptr(), tensor.numel())
        if key not in self._wires:
            self._wires[key] = torch.empty_like(tensor, dtype=dtype)
        return self._wires[key]

    def close(self) -> None:
        self._groups.close()


class ThreadTransport(Transport):
    """Sums each message on the communication thread, with the plan's algorithm and wire format.

    Gradients are already scaled for the mean over the global batch, so their sums need no scaling. On
    a GPU, the thread's stream waits until backward has written the gradients, and the stream that
    computes the training step waits for the sums.
    """

    overlaps = True

    def __init__(self, group: Group, planned: PlannedAllReduce) -> None:
        self._group = group
        self.planned = planned
        self._under_way = 0

    @property
    def memory(self) -> Memory | None:
        return self.planned.memory

    def send(self, pieces: Sequence[Piece], begun: Notify, ended: Notify) -> Wait:
        def run() -> Tensor:
            begun()
            for piece in pieces:
                self.planned.carry(piece.tensor, piece.algorithm, piece.wire)
            ended()
            return pieces[0].tensor

        future = self.planned.thread.submit(run, pieces[0].tensor.device)
        self._under_way += 1

        def wait() -> None:
            try:
                future.wait()
            except RuntimeError as error:
                # The future only has the message; the error's type matters too.
                cause = self.planned.thread.failure
                if isinstance(cause, CommError):
                    raise self._group.peer_error(cause) from cause
                raise cause or error from error
            self._under_way -= 1

        return wait

    def abandon(self) -> None:
        self.planned.thread.close(wait=False)

    def close(self) -> None:
        """Closes the thread and its groups, unless a message is under way.

        If a message is under way, the thread might be stuck and is left running; as a daemon thread it
        ends with the process. If a message has failed, the groups are closed, so that the other ranks
        notice the failure.
        """
        if self._under_way == 0 or self.planned.thread.failure is not None:
            self.planned.close()


def create_planned(
    group: Group, settings: CommSettings, plan: FusionPlan, *, native: bool
) -> Transport:
    """Creates the transport of a plan. All ranks call this at the same point.

    Args:
        group: All ranks.
        settings: The section `[comm]`.
        plan: The fusion plan.
        native: True if all algorithms of the plan are `native`, the backend's own all-reduce.
    """
    only_world = native and group.backend == "nccl"
    groups = ProcessGroups(
        group.topology,
        settings.group_size or None,
        timeout_s=settings.timeout_s,
        grace_s=BACKEND_GRACE_S,
        subgroups=False if only_world else None,
        connect_s=group.connect_s,
        algorithms={a for b in plan.buckets for a in (b.algorithm, b.beside_algorithm)},
    )
    if only_world:
        return NativeTransport(group, groups)
    # The first collective of the new groups, while all ranks are at the same point.
    groups.check_same({"the fusion plan": plan.fingerprint})
    wires = {bucket.wire for bucket in plan.buckets}
    return ThreadTransport(group, PlannedAllReduce(groups, wires, settings))
