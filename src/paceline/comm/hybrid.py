"""`HybridAllReduce`: for every buffer the algorithm that its size asks for.

In: process groups, a `SizeTable` and a wire format; then buffers, or the buckets of DDP. Out: their sums
or means, bit-identical on all ranks, summed on the communication thread with groups of its own:

    state = HybridAllReduce.from_env(SizeTable.two_way(eta_bytes=1 << 20))
    ddp.register_comm_hook(state, HybridAllReduce.ddp_hook)
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with its classes.
import os
import re
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined] # public, not in __all__
from torch.futures import Future

from paceline.comm.algorithms.all_reduce import AllReduce, check_buffer
from paceline.comm.algorithms.catalogue import create_algorithm
from paceline.comm.algorithms.staging import Staging
from paceline.comm.comm_thread import CommThread
from paceline.comm.process_groups import ProcessGroups
from paceline.comm.size_table import SizeTable
from paceline.comm.wire import WireFormat
from paceline.core.errors import CommError
from paceline.core.topology import Topology

__all__ = ["HybridAllReduce", "SizeTable"]


class HybridAllReduce:
    """Chooses by size, casts to the wire format, sums, casts back.

    Every rank hands over the same buffers in the same order. A failed exchange fails its future, and
    every later one, with a `CommError`; the timeout is that of the process groups.
    """

    def __init__(self, groups: ProcessGroups, table: SizeTable, wire: str = "float32") -> None:
        self.groups = groups
        self.table = table
        self._wire = wire
        WireFormat.named(wire)
        groups.check_same({"comm.wire": wire, "comm.sizes": table.to_table()})
        self._staging = Staging()
        self._algorithms: dict[str, AllReduce] = {
            name: create_algorithm(name, groups, self._staging) for name in table.algorithms
        }
        self._thread = CommThread()

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
        self._travel(buffer, self.choose(buffer), self._format(buffer), divide_by)

    def carry(self, buffer: Tensor, algorithm: str, wire: str) -> None:
        """The same by the algorithm and in the format that a plan names; `auto`: as the buffer is.

        The sum must have room in the format itself, as that of shares of a mean has.
        """
        self._travel(buffer, algorithm, WireFormat.for_tensor(buffer, wire), 1)

    def submit(self, buffer: Tensor, *, mean: bool = False) -> Future[Tensor]:
        """`all_reduce` on the communication thread; returns at once."""
        check_buffer(buffer)

        def run() -> Tensor:
            self.all_reduce(buffer, mean=mean)
            return buffer

        return self.queue(run, buffer.device)

    def queue(self, run: Callable[[], Tensor], device: torch.device) -> Future[Tensor]:
        """`run` on the communication thread, once what `device` still computes is there."""
        return self._thread.submit(run, device)

    @property
    def failure(self) -> BaseException | None:
        """Why the communication thread carries nothing any more."""
        return self._thread.failure

    @staticmethod
    def ddp_hook(state: "HybridAllReduce", bucket: GradBucket) -> Future[Tensor]:
        """A communication hook of DistributedDataParallel: the mean over ranks, as DDP expects."""
        return state.submit(bucket.buffer(), mean=True)

    def close(self) -> None:
        """Ends the communication thread and leaves its process groups."""
        self._thread.close()
        self.groups.close()

    def _format(self, buffer: Tensor) -> WireFormat:
        """A buffer that is 16 bits wide already travels as it is."""
        full = str(buffer.dtype).removeprefix("torch.")
        name = self._wire if buffer.dtype == torch.float32 else full
        return WireFormat.named(name, self.groups.world_size)

    def _travel(self, buffer: Tensor, name: str, wire: WireFormat, divide_by: int) -> None:
        check_buffer(buffer)
        # Gloo reads and writes memory of the host only.
        staged = buffer.is_cuda and self.groups.backend == "gloo"
        travelling = buffer
        if wire.dtype != buffer.dtype:
            travelling = self._staging.take("wire", buffer.numel(), wire.dtype, buffer.device)
        wire.encode(buffer, travelling)
        if staged:
            host = self._staging.take(
                "host", buffer.numel(), wire.dtype, torch.device("cpu"), pinned=True
            )
            host.copy_(travelling)
            self._run(name, host)
            travelling.copy_(host)
        else:
            self._run(name, travelling)
        wire.decode(travelling, buffer, divide_by)

    def _run(self, name: str, buffer: Tensor) -> None:
        try:
            if name not in self._algorithms:  # which may connect ranks
                self._algorithms[name] = create_algorithm(name, self.groups, self._staging)
            self._algorithms[name].all_reduce(buffer)
        except torch.AcceleratorError:
            raise  # this rank's own device failed
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise  # this rank's own, and not the others'
            # Without the line of its own source code that the backend begins with.
            text = re.sub(r"^\[[^\]]*:\d+\]\s*", "", str(error).strip())
            reason = (text.splitlines() or [type(error).__name__])[0].partition(". ")[0][:160]
            raise CommError(
                f"{name} all-reduce of {buffer.nbytes} bytes broke on rank "
                f"{self.groups.rank} ({reason})",
                f"a rank is gone or {self.groups.timeout_s:g} s late; look into the ranks' logs",
            ) from error
