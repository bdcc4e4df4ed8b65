"""`HybridAllReduce`: for every buffer the algorithm that its size asks for.

In: process groups, a `SizeTable` and a wire format; then buffers, or the buckets of DDP. Out: their sums
or means, bit-identical on all ranks, summed on the communication thread with groups of its own:

    state = HybridAllReduce.from_env(SizeTable.two_way(eta_bytes=1 << 20))
    ddp.register_comm_hook(state, HybridAllReduce.ddp_hook)

It chooses; `PlannedAllReduce` executes, also what a fusion plan has chosen.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with its classes.
import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined] # public, not in __all__
from torch.futures import Future

from paceline.comm.comm_thread import CommThread
from paceline.comm.executor import Executor, check_buffer
from paceline.comm.process_groups import ProcessGroups, backend_reason
from paceline.comm.wire import WireFormat
from paceline.core.errors import CommError
from paceline.core.topology import Topology
from paceline.plan.size_table import SizeTable

__all__ = ["HybridAllReduce", "PlannedAllReduce", "SizeTable"]


class PlannedAllReduce:
    """Casts to the wire format, sums by the algorithm that it is given, casts back; in the caller's
    thread or on the communication thread.

    Every rank hands over the same buffers in the same order. A failed exchange fails its future, and
    every later one, with a `CommError`; the timeout is that of the process groups.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self._executor = Executor(groups)
        self.staging = self._executor.staging
        self._thread = CommThread()

    def prepare(self, algorithm: str) -> None:
        """Connects the ranks as the algorithm needs it. All ranks call this at the same point."""
        self._executor.prepare(algorithm)

    def carry(self, buffer: Tensor, algorithm: str, wire: str) -> None:
        """Sums `buffer` over ranks, in this thread; `auto` is the buffer's own format.

        The sum must not overflow the format; that of shares of a mean does not.
        """
        self.run(buffer, algorithm, WireFormat.for_tensor(buffer, wire))

    def queue(self, run: Callable[[], Tensor], device: torch.device) -> Future[Tensor]:
        """`run` on the communication thread, once what `device` still computes is there."""
        return self._thread.submit(run, device)

    @property
    def failure(self) -> BaseException | None:
        """Why the communication thread carries nothing any more."""
        return self._thread.failure

    def close(self) -> None:
        """Ends the communication thread and leaves its process groups."""
        self._thread.close()
        self.groups.close()

    def run(self, buffer: Tensor, algorithm: str, wire: WireFormat, divide_by: int = 1) -> None:
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
        try:
            self._executor.all_reduce(buffer, algorithm)
        except torch.AcceleratorError:
            raise  # this rank's own device failed
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise  # this rank's own, and not the others'
            raise CommError(
                f"{algorithm} all-reduce of {buffer.nbytes} bytes broke on rank "
                f"{self.groups.rank} ({backend_reason(error)})",
                f"a rank is gone or {self.groups.timeout_s:g} s late; look into the ranks' logs",
            ) from error


class HybridAllReduce:
    """Chooses an algorithm by the bytes that travel, and has a `PlannedAllReduce` execute it."""

    def __init__(self, groups: ProcessGroups, table: SizeTable, wire: str = "float32") -> None:
        self.groups = groups
        self.table = table
        self._wire = wire
        WireFormat.named(wire)
        groups.check_same({"comm.wire": wire, "comm.sizes": table.to_table()})
        self._planned = PlannedAllReduce(groups)
        for name in table.algorithms:
            self._planned.prepare(name)

    @classmethod
    def from_env(
        cls,
        table: SizeTable,
        *,
        wire: str = "float32",
        k: int | None = None,
        timeout_s: float = 600.0,
    ) -> "HybridAllReduce":
        """With the topology that the launcher left in the environment; torch.distributed must be
        initialised, and every rank calls this at the same point."""
        topology = Topology.from_env(os.environ)
        return cls(ProcessGroups(topology, k, timeout_s=timeout_s), table, wire)

    def choose(self, buffer: Tensor) -> str:
        """The name of the algorithm for this buffer, by the bytes that will travel."""
        return self.table.choose(buffer.numel() * self._format(buffer).dtype.itemsize)

    def all_reduce(self, buffer: Tensor, *, mean: bool = False) -> None:
        """Sums `buffer` over ranks, in this thread; not while submitted buffers are under way."""
        divide_by = self.groups.world_size if mean else 1
        self._planned.run(buffer, self.choose(buffer), self._format(buffer), divide_by)

    def submit(self, buffer: Tensor, *, mean: bool = False) -> Future[Tensor]:
        """`all_reduce` on the communication thread; returns at once."""
        check_buffer(buffer)

        def run() -> Tensor:
            self.all_reduce(buffer, mean=mean)
            return buffer

        return self._planned.queue(run, buffer.device)

    @staticmethod
    def ddp_hook(state: "HybridAllReduce", bucket: GradBucket) -> Future[Tensor]:
        """A communication hook of DistributedDataParallel: the mean over ranks, as DDP expects."""
        return state.submit(bucket.buffer(), mean=True)

    @property
    def failure(self) -> BaseException | None:
        """The error of the first buffer that failed on the communication thread."""
        return self._planned.failure

    def close(self) -> None:
        """Ends the communication thread and leaves its process groups."""
        self._planned.close()

    def _format(self, buffer: Tensor) -> WireFormat:
        """A buffer that is 16 bits wide already travels as it is."""
        full = str(buffer.dtype).removeprefix("torch.")
        name = self._wire if buffer.dtype == torch.float32 else full
        return WireFormat.named(name, self.groups.world_size)
