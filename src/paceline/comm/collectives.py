"""`Collectives`: the collectives on tensors and bytes that all ranks of a run use."""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from paceline.comm.settings import BACKEND_GRACE_S
from paceline.core.topology import Topology

Made = TypeVar("Made")

# How long aborting NCCL's communicators may take before the process ends regardless.
_ABORT_WAIT_S = 3.0
# Number of bytes of all ranks that `gather_bytes` holds on rank 0's device at the same time.
_GATHERED_BYTES = 256 * 2**20


class Collectives(ABC):
    """Collectives on tensors and bytes. All ranks call every method in the same order.

    The backend `none` is for a single process, which has nothing to send.
    """

    def __init__(self, topology: Topology, device: torch.device, backend: str) -> None:
        self.topology = topology
        self.rank = topology.rank
        self.world_size = topology.world_size
        self.device = device
        self.backend = backend

    @abstractmethod
    def watched(self, what: str, action: Callable[[], Made]) -> Made:
        """Runs `action`, a collective, under the watchdog and returns its result.

        `what` is the name of the collective in error messages.
        """

    def completed(self, what: str, action: Callable[[], object]) -> None:
        """Runs a collective under the watchdog and waits until the device has completed it.

        NCCL's calls return once the work is queued. Without waiting here, the host could later wait
        for a lost rank at a point that the watchdog does not monitor.

        Args:
            what: The name of the collective, for error messages.
            action: Function that starts the collective.
        """

        def complete() -> None:
            action()
            if self.backend == "nccl":
                torch.cuda.current_stream(self.device).synchronize()

        self.watched(what, complete)

    def await_work(self, work: Any) -> None:
        """Waits for a collective that has been started with `async_op`."""
        work.wait()

    def all_reduce_sum(self, tensor: Tensor, *, wait: bool = True) -> None:
        """Replaces `tensor` by its sum over ranks, which is bit-identical on all ranks.

        Args:
            tensor: This rank's summand, which the sum replaces.
            wait: Wait until a GPU has finished. If False, the caller must wait for the device inside
                `watched`.
        """
        if self.backend == "none":
            return

        def action() -> None:
            self.await_work(dist.all_reduce(tensor, async_op=True))

        if wait:
            self.completed("all-reduce", action)
        else:
            self.watched("all-reduce", action)

    def create_subgroup(self, size: int, timeout_s: float) -> Callable[[Tensor], None]:
        """Returns a function that sums a tensor over this rank's group of `size` consecutive ranks.

        All ranks call this method. The returned function does not wait for a GPU. Over Gloo the sum is
        complete when the function returns.

        Args:
            size: Number of ranks in a group.
            timeout_s: Time limit of a sum in seconds.
        """
        made: Any = None
        wait = timedelta(seconds=timeout_s + BACKEND_GRACE_S)
        for first in range(0, self.world_size, size):
            members = list(range(first, first + size))
            # Every rank creates every group, also groups to which it does not belong: torch numbers
            # groups to name them.
            make = partial(dist.new_group, members, timeout=wait, backend=self.backend)
            created = self.watched("creating a group of ranks", make)
            made = created if self.rank in members else made

        def all_reduce(tensor: Tensor) -> None:
            self.watched("batch-norm statistics", lambda: dist.all_reduce(tensor, group=made))

        return all_reduce

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Copies the `tensor` of rank `source` into the `tensor` of every other rank."""
        if self.backend != "none":
            self.completed(
                "broadcast",
                lambda: self.await_work(dist.broadcast(tensor, src=source, async_op=True)),
            )

    def gather_rows(self, rows: Tensor, lengths: Sequence[int]) -> None:
        """Copies each rank's row of `rows` to all ranks. Each rank has filled only its own row.

        NCCL transfers whole rows, with one all-gather that a CUDA graph can capture. Over Gloo each rank
        broadcasts only the elements that contain data, which is faster than Gloo's all-gather.

        Args:
            rows: A tensor with one row for each rank, which is completed in place.
            lengths: Number of elements at the start of each row that contain data.
        """
        if self.backend == "none":
            return
        if self.backend == "nccl":
            own = rows[self.rank]
            self.watched("all-gather", lambda: all_gather_flat(rows.view(-1), own))
            return

        def send() -> None:
            under_way = [
                dist.broadcast(rows[r, :length], src=r, async_op=True)
                for r, length in enumerate(lengths)
                if length
            ]
            for work in under_way:
                assert work is not None
                self.await_work(work)

        self.watched("all-gather", send)

    def broadcast_bytes(self, data: bytes | memoryview | None, source: int = 0) -> bytes:
        """Returns the `data` of rank `source` on every rank. Other ranks may pass None."""
        if self.backend == "none":
            assert data is not None
            return bytes(data)
        length = torch.tensor([len(data) if data is not None else 0], device=self.device)
        self.broadcast(length, source)
        if data is not None and self.rank == source:
            content = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8).to(self.device)
        else:
            content = torch.empty(max(1, int(length)), dtype=torch.uint8, device=self.device)
        self.broadcast(content, source)
        return content.cpu().numpy().tobytes()[: int(length)]

    def gather(self, row: Tensor) -> Tensor | None:
        """Returns the tensor `row` of every rank, stacked, on rank 0's CPU; None on other ranks."""
        if self.backend == "none":
            return row.detach().cpu()[None].clone()
        rows = [torch.empty_like(row) for _ in range(self.world_size)] if self.rank == 0 else None
        self.completed("gather", lambda: dist.gather(row.contiguous(), rows, dst=0))
        # Rows are copied one by one: stacking them on the device would double the memory.
        return torch.stack([own.cpu() for own in rows]) if rows is not None else None

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Returns the bytes of every rank, in order of rank, on rank 0; None on other ranks."""
        lengths = self.gather(torch.tensor([len(data)], device=self.device))
        longest = int(lengths.max()) if lengths is not None else 0
        width = int(self.broadcast_bytes(str(longest).encode()))
        row = torch.zeros(max(1, width), dtype=torch.uint8)
        row[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[
            : len(data)
        ]
        # Data is sent in pieces, so that rank 0's device never holds the whole data of all ranks.
        piece = max(1, _GATHERED_BYTES // self.world_size)
        parts = [self.gather(own.to(self.device)) for own in torch.split(row, piece)]
        if lengths is None:
            return None
        contents = [bytearray() for _ in range(self.world_size)]
        for part in parts:
            assert part is not None
            for own, content in zip(contents, part, strict=True):
                own += content.numpy().tobytes()
        sizes = lengths.flatten().tolist()
        return [bytes(own[:size]) for own, size in zip(contents, sizes, strict=True)]


def abort_process_groups(
    release_graphs: Iterable[Callable[[], None]], limit_s: float = _ABORT_WAIT_S
) -> None:
    """Ends all process groups without waiting for the other ranks, within about `limit_s` seconds.

    The abort ends kernels that wait for a lost rank. Torch's abort only returns if no CUDA graph refers
    to the communicators, so graphs are destroyed first. All this runs in a thread, because the calls
    might not return after a CUDA error or on a stuck device.

    Args:
        release_graphs: Functions that destroy CUDA graphs.
        limit_s: How many seconds to wait for the thread.
    """

    def run() -> None:
        for release in release_graphs:
            # A lost CUDA context can raise. Then still release the other graphs and abort the groups.
            with suppress(Exception):
                release()
        with suppress(Exception):  # a lost CUDA context, or the groups do not exist any more
            if dist.is_initialized():
                distributed_c10d._abort_process_group()

    thread = threading.Thread(target=run, name="paceline-abort", daemon=True)
    thread.start()
    thread.join(limit_s)


def backend_reason(error: RuntimeError) -> str:
    """Returns the first sentence of a backend's error message, without the leading source location."""
    text = re.sub(r"^\[[^\]]*:\d+\]\s*", "", str(error).strip())
    return text.splitlines()[0].partition(". ")[0][:160] if text else type(error).__name__


def _either(new: str, old: str) -> Callable[..., Any]:
    """Returns the collective of torch.distributed that is named `new`, or `old` in older versions.

    Torch 2.11 has only the old names; from 2.13 on they cause warnings.
    """
    function: Callable[..., Any] = getattr(dist, new if hasattr(dist, new) else old)
    return function


reduce_scatter_flat = _either("reduce_scatter_single", "reduce_scatter_tensor")
all_gather_flat = _either("all_gather_single", "all_gather_into_tensor")
