"""`HybridAllReduce`: an all-reduce whose algorithm depends on the buffer size; also a hook for DDP."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with its classes.

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined] # public, not in __all__
from torch.futures import Future

from paceline.comm.executor import check_buffer
from paceline.comm.planned_transport import PlannedAllReduce, WireFormat
from paceline.comm.process_groups import ProcessGroups, current_topology
from paceline.core.errors import CommError
from paceline.plan.size_table import SizeTable

__all__ = ["HybridAllReduce", "SizeTable"]


class HybridAllReduce:
    """Sums or averages buffers over ranks, by an algorithm that depends on their size.

    The results are bit-identical on all ranks. Submitted buffers are reduced on a communication thread
    with its own process groups.

    Args:
        groups: The process groups.
        table: The algorithm for each buffer size.
        wire: The number format in which float32 buffers are sent. 16-bit buffers keep their format.

    Example:
        >>> state = pl.HybridAllReduce.from_env(pl.SizeTable.two_way(eta_bytes=1 << 20))
        >>> ddp.register_comm_hook(state, pl.HybridAllReduce.ddp_hook)
    """

    def __init__(self, groups: ProcessGroups, table: SizeTable, wire: str = "float32") -> None:
        self.groups = groups
        self.table = table
        self._wire = wire
        WireFormat.named(wire)
        groups.check_same({"comm.wire": wire, "comm.hybrid.sizes": table.to_table()})
        self._planned = PlannedAllReduce(groups)
        # Set inside DDP's `join` if means are over the ranks that still have batches: True if this rank
        # has a batch. Otherwise None.
        self.present: bool | None = None
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
        """Creates the object from the launcher's environment. Every rank calls this at the same point.

        torch.distributed must be initialized.

        Args:
            table: The algorithm for each buffer size.
            wire: The number format in which float32 buffers are sent.
            k: The number of ranks in a group of the hierarchical algorithms. None means the ranks of a
                node.
            timeout_s: The time limit of a collective in seconds.
        """
        return cls(ProcessGroups(current_topology(), k, timeout_s=timeout_s), table, wire)

    def choose(self, buffer: Tensor) -> str:
        """Returns the name of the algorithm for this buffer, by its size in the wire format."""
        return self.table.choose(buffer.numel() * self._format(buffer).dtype.itemsize)

    def all_reduce(self, buffer: Tensor, *, mean: bool = False) -> None:
        """Sums `buffer` over ranks, in this thread. No submitted buffer may be in progress.

        Args:
            buffer: A contiguous 1-D tensor.
            mean: Divide the sum by the number of ranks.
        """
        divide_by = self.groups.world_size if mean else 1
        self._planned.run(buffer, self.choose(buffer), self._format(buffer), divide_by)

    def submit(self, buffer: Tensor, *, mean: bool = False) -> Future[Tensor]:
        """Runs `all_reduce` on the communication thread, and returns at once.

        Args:
            buffer: A contiguous 1-D tensor.
            mean: Divide the sum by the number of ranks.

        Returns:
            A future with the buffer.
        """
        check_buffer(buffer)

        def run() -> Tensor:
            self.all_reduce(buffer, mean=mean)
            return buffer

        return self._planned.thread.submit(run, buffer.device)

    @staticmethod
    def ddp_hook(state: "HybridAllReduce", bucket: GradBucket) -> Future[Tensor]:
        """Communication hook of DistributedDataParallel: computes the mean over ranks, as DDP expects.

        Args:
            state: The first argument of `register_comm_hook`.
            bucket: The bucket of gradients.
        """
        buffer, present = bucket.buffer(), state.present
        if buffer.layout != torch.strided:
            return state._submit_sparse(buffer, present)
        if present is None:
            return state.submit(buffer, mean=True)
        check_buffer(buffer)

        def run() -> Tensor:
            state.all_reduce(buffer)
            return buffer.div_(state._count(buffer.device, present))

        return state._planned.thread.submit(run, buffer.device)

    def _submit_sparse(self, buffer: Tensor, present: bool | None) -> Future[Tensor]:
        """Sums sparse gradients by the backend's own all-reduce, without a cast."""
        if self.groups.backend == "nccl":
            raise CommError(
                "sparse gradients cannot travel over NCCL", "use nn.Embedding(sparse=False)"
            )

        def run() -> Tensor:
            dist.all_reduce(buffer, group=self.groups.world)
            return buffer.div_(self._count(buffer.device, present))

        return self._planned.thread.submit(run, buffer.device)

    def _count(self, device: torch.device, present: bool | None) -> Tensor:
        """Returns the number of ranks that contribute to the sum."""
        count = torch.full((1,), 1.0 if present is None else float(present), device=device)
        dist.all_reduce(count, group=self.groups.world)
        return count[0]

    def close(self) -> None:
        """Ends the communication thread and leaves its process groups."""
        self._planned.close()

    def _format(self, buffer: Tensor) -> WireFormat:
        """Returns the format in which `buffer` is sent. A 16-bit buffer keeps its format."""
        full = str(buffer.dtype).removeprefix("torch.")
        name = self._wire if buffer.dtype == torch.float32 else full
        return WireFormat.named(name, self.groups.world_size)
