"""`init`: sets up device, rank and process group of this process, under any launcher.

`DataParallel`, `prepare` and the other parts do not need `init`. They also work with a process group that
the program has created.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from paceline.comm.agreement import Agreement
from paceline.comm.collectives import abort_process_groups, backend_reason
from paceline.comm.peer_errors import AgreedError, error_kind
from paceline.comm.process_groups import (
    all_gather_json,
    compare_reports,
    current_topology,
    init_default_group,
    prepare_nccl,
)
from paceline.comm.rendezvous import meet
from paceline.comm.settings import CommSettings
from paceline.core.errors import CommError, ConfigError, PacelineError
from paceline.core.host import DeferredEnd, ask_for_connections
from paceline.core.topology import Topology
from paceline.train.machine import choose_gpu

_current: Context | None = None
# Objects that use process groups. The context calls their `release` before it destroys the groups.
_holders: WeakSet[Any] = WeakSet()


@dataclass(eq=False)
class Context:
    """Rank, device and process group of this process, created by `init`.

    A `with` block closes the context at its end. After an exception, closing does not wait for other
    ranks.

    Attributes:
        topology: Ranks, nodes and launcher of the job.
        device: Device of this rank.
        backend: `nccl`, `gloo`, or `none` for a single process.
        timeout_s: Time limit of collectives in seconds.
        agreement: Compares errors between ranks; None unless `init` has created the process group. If
            it has, closing this context also closes the process group.

    Example:
        >>> with init(device="cpu") as context:
        ...     context.rank, context.world_size, context.is_main, str(context.device)
        (0, 1, True, 'cpu')
    """

    topology: Topology
    device: torch.device
    backend: str
    timeout_s: float
    agreement: Agreement | None = None
    _closed: bool = field(default=False, init=False)

    @property
    def rank(self) -> int:
        """Index of this process in the job, from 0."""
        return self.topology.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the job."""
        return self.topology.world_size

    @property
    def local_rank(self) -> int:
        """Index of this rank on its node."""
        return self.topology.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this node."""
        return self.topology.local_world_size

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.topology.is_main

    def barrier(self) -> None:
        """Waits until all ranks have called `barrier`.

        Raises:
            CommError: If a rank is lost or arrives more than `timeout_s` late.
        """
        if not dist.is_initialized():
            return
        try:
            dist.barrier()
        except torch.AcceleratorError:
            raise
        except RuntimeError as error:
            raise CommError(
                f"barrier broke on rank {self.rank} ({backend_reason(error)})",
                "a rank is gone or late; the log of the first rank to fail has the cause",
            ) from error

    def close(self) -> None:
        """Leaves the process group, if `init` has created it. A second call does nothing."""
        self._close(abort=False)

    def _close(self, *, abort: bool) -> None:
        global _current
        if self._closed:
            return
        self._closed = True
        if _current is self:
            _current = None
        if self.agreement is None:
            return
        if abort and self.backend == "nccl":
            # Other ranks may wait in a collective that this rank never joins.
            abort_process_groups([])
        else:
            # A DDP model that outlives its Gloo group deadlocks. The model destroys the group's threads
            # while it holds the interpreter's lock, which these threads need.
            holders = list(_holders)
            for holder in holders:
                with suppress(RuntimeError):
                    holder.release()
            if holders:
                gc.collect()
            if dist.is_initialized():
                dist.destroy_process_group()
        self.agreement.leave()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close(abort=error is not None)

    def __repr__(self) -> str:
        return (
            f"Context(rank={self.rank}, world_size={self.world_size}, device='{self.device}', "
            f"backend='{self.backend}', launcher='{self.topology.launcher}')"
        )


def init(
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout_s: float = 600.0,
    *,
    share_gpus: bool = False,
) -> Context:
    """Chooses this rank's device and joins the process group of all ranks.

    Works under torchrun, srun and mpirun. Without a launcher, there is one rank and no process group. If
    a process group exists already, the context uses it and leaves it open. A second call returns the same
    context.

    Args:
        backend: `nccl` or `gloo`. None means NCCL on GPUs and Gloo otherwise.
        device: Device of this rank. None means the GPU of the local rank, or the CPU without GPUs.
        timeout_s: Time limit, in seconds, of the rendezvous and of every collective.
        share_gpus: True to allow several NCCL ranks on one GPU; needs NVIDIA MPS.

    Returns:
        The context.

    Raises:
        PacelineError: If any rank fails. All ranks raise the same error.

    Example:
        >>> with init(device="cpu") as context:
        ...     context.barrier()
        ...     context
        Context(rank=0, world_size=1, device='cpu', backend='none', launcher='single')
    """
    global _current
    if _current is not None:
        return _same(_current, backend, device)
    settings = CommSettings(
        backend=backend or "auto", timeout_s=timeout_s, rendezvous_timeout_s=timeout_s,
        share_gpus=share_gpus,
    )  # fmt: skip
    if dist.is_initialized():
        topology, existing = topology_here(), str(dist.get_backend())
        if existing != "nccl":  # ranks may then share a GPU
            settings = replace(settings, backend="gloo")
    else:
        topology, existing = Topology.from_env(os.environ), "none"
        if topology.launcher != "single":
            _current = _join(topology, device, settings)
            return _current
    _current = Context(topology, _choose_device(device, topology, settings), existing, timeout_s)
    return _current


def _join(topology: Topology, wanted: str | torch.device | None, settings: CommSettings) -> Context:
    device, error = torch.device("cpu"), None
    backend = settings.backend
    try:
        device = _choose_device(wanted, topology, settings)
        if backend == "auto":
            backend = "nccl" if device.type == "cuda" else "gloo"
        if backend == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
            raise ConfigError(
                "backend", "nccl", "needs CUDA devices and a torch with NCCL", 'use backend="gloo"'
            )
        if backend == "nccl":
            # A custom loop has no watchdog of Paceline, so torch's must stay on.
            prepare_nccl(topology, share_gpus=settings.share_gpus, watched=False)
    except PacelineError as caught:
        error = caught
    # A rank with an error joins the rendezvous nevertheless, so that all ranks raise this error.
    with DeferredEnd(active=not topology.ends_together) as end:
        store = meet(topology, settings.timeout_s, {"program": "own loop"}, end=end).store
    agreement = Agreement(store, topology, settings.timeout_s)
    facts = {"backend": backend, "device": device.type} if error is None else {}
    try:
        agreement.agree("join", error, facts, "use the same kind of device everywhere")
        init_default_group(backend, store, topology, settings.timeout_s, device)
    except PacelineError:
        agreement.leave()
        raise
    except RuntimeError as failure:
        raise CommError(
            f"rank {topology.rank} cannot join the {backend} process group "
            f"({backend_reason(failure)})",
            "look into the logs of the other ranks",
        ) from failure
    return Context(topology, device, backend, settings.timeout_s, agreement)


def _same(context: Context, backend: str | None, device: str | torch.device | None) -> Context:
    kind = None if device is None else _parse_device(device).type
    for name, wanted, chosen in (
        ("backend", backend, context.backend), ("device", kind, context.device.type),
    ):  # fmt: skip
        if wanted not in (None, "auto", chosen):
            problem = f"differs from {chosen!r}, which an earlier pl.init() has chosen"
            raise ConfigError(
                name, wanted, problem, "close the earlier context first: context.close()"
            )
    return context


def _parse_device(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError:
        raise ConfigError("device", str(device), "is not a device", "use 'cpu' or 'cuda'") from None


def _choose_device(
    wanted: str | torch.device | None, topology: Topology, settings: CommSettings
) -> torch.device:
    """Returns the device that the caller wants, or else one GPU per rank, or the CPU."""
    ask_for_connections(topology.local_world_size if settings.share_gpus else 1)
    given = None if wanted is None else _parse_device(wanted)
    if given is not None and given.type != "cuda":
        return given
    count = torch.cuda.device_count()
    if count == 0:
        if given is None:
            return torch.device("cpu")
        raise ConfigError("device", str(given), "this host has no CUDA device", "use device='cpu'")
    if given is not None and given.index is not None:
        if given.index >= count:
            raise ConfigError("device", str(given), f"this host has {count} CUDA devices")
        device = given
    else:
        device = choose_gpu(topology, settings)
    torch.cuda.set_device(device)
    return device


def topology_here() -> Topology:
    """Returns the topology of the open context, or else of the launcher or an existing process group."""
    return current_topology(None if _current is None else _current.topology)


def timeout_here() -> float:
    """Returns the time limit of collectives in seconds: of the open context, or else the default."""
    return 600.0 if _current is None else _current.timeout_s


def several_ranks(group: dist.ProcessGroup | None = None) -> bool:
    """Returns True if the process group `group`, or the default group, has several ranks."""
    return dist.is_initialized() and dist.get_world_size(group) > 1


def release_on_close(holder: Any) -> None:
    """Makes the open context call `holder.release()` before it destroys the process groups."""
    _holders.add(holder)


@contextmanager
def agreed(
    facts: Callable[[], Mapping[str, Any]] = dict, group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """Raises the same error on all ranks of a group if the block fails on any rank.

    All ranks of the group enter this context.

    Args:
        facts: Returns values that must be equal on all ranks, by name; called at the end of the block.
        group: Process group of the ranks; None for the default group.

    Raises:
        PacelineError: If the block failed on any rank, or if facts differ between ranks.
    """
    error = None
    try:
        yield
    except PacelineError as caught:
        if not several_ranks(group):
            raise
        error = caught
    if not several_ranks(group):
        return
    mine: dict[str, Any] = {"error": "", "facts": {}}
    if error is None:
        mine["facts"] = dict(facts())
    else:
        mine |= {"error": str(error), "code": error.exit_code, "kind": error_kind(error)}
    reports = all_gather_json(mine, group)
    for rank, report in enumerate(reports):
        if report["error"]:
            if error is not None and rank == dist.get_rank(group):
                raise error
            text = f"rank {rank}: {report['error']}"
            raise AgreedError.of_kind(report["kind"], text, report["code"])
    facts_of_all = [report["facts"] for report in reports]
    compare_reports(facts_of_all, "give every rank the same model and arguments")
