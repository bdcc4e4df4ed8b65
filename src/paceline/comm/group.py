"""`Group`: the ranks of a run and what they do together.

Collectives on tensors, broadcast and gather of bytes, agreement, and a watchdog over all of them. A
single process without a launcher is a group of one that needs no backend.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.comm.agreement import (
    SAME_SETTINGS,
    Agreement,
    PeerError,
    Remedies,
    explain_lost_store,
)
from paceline.comm.job import RankHosts, format_ranks
from paceline.comm.process_groups import (
    abort_process_groups,
    all_gather_flat,
    backend_reason,
    prepare_nccl,
)
from paceline.comm.progress import BucketInfo, ProgressBoard
from paceline.comm.rendezvous import meet
from paceline.comm.settings import BACKEND_GRACE_S, CommSettings
from paceline.comm.watchdog import ShowError, Watchdog
from paceline.core.errors import CommError, DeviceError, PacelineError, RunError
from paceline.core.topology import Topology

Made = TypeVar("Made")

# How long a rank whose collective broke waits for the rank that failed to post its error.
_FAULT_WAIT_S = 2.0
# How long the store's host stays for ranks that may still have to read; longer than they wait.
_LEAVE_WAIT_S = 3.0
_SUSPECT_WAITS, _SUSPECT_PAUSE_S = 12, 0.25
# Of all ranks, on rank 0's device at a time.
_GATHERED_BYTES = 256 * 2**20
# How long aborting NCCL's communicators may take before the process ends regardless.
_ABORT_WAIT_S = 3.0


class SharedFacts:
    """What must be equal on all ranks, collected in a `Group.phase`."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.remedies: dict[str, str] = {}

    def compare(self, facts: Mapping[str, Any], remedy: str = SAME_SETTINGS) -> None:
        """With the other ranks', at the end of the phase."""
        self.values |= facts
        self.remedies |= dict.fromkeys(facts, remedy)


class Group:
    """All ranks of the run. Every method but `close` is called by all of them alike."""

    def __init__(
        self,
        topology: Topology,
        settings: CommSettings,
        device: torch.device,
        show_error: ShowError | None = None,
        shared: Mapping[str, Any] | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        """`show_error` shows an error when the watchdog ends this process. `shared`: settings that all
        ranks of the job have in common, by which another job at the same port is recognized. These
        and `versions`, of the software, are compared once all ranks have met."""
        self.topology = topology
        self.device = device
        self._share_gpus = settings.share_gpus
        # An observer of the exchange; the watchdog reads it.
        self.board = ProgressBoard()
        self._watchdog: Watchdog | None = None
        self._hosts = RankHosts()
        self.backend = choose_backend(settings, topology, device)
        self._agreement: Agreement | None = None
        self._own_fault: PacelineError | None = None
        self._stop_heard = False
        # Destroy CUDA graphs that hold collectives; see `abort`.
        self._release_graphs: list[Callable[[], None]] = []
        self._last_actions: list[Callable[[], None]] = []
        self._left = self._device_lost = False
        # The process groups have been aborted, and must not be closed any more.
        self.aborted = False
        # On rank 0: the launcher has restarted the ranks of this job.
        self.restarted = False
        if self.backend == "none":
            return
        if dist.is_initialized():
            raise CommError(
                "this process has a torch.distributed process group already",
                "close it first: pl.init() and pl.Trainer each make their own, one after the other",
            )
        if self.backend == "nccl":
            prepare_nccl(topology, share_gpus=settings.share_gpus)
        with ExitStack() as lookups:
            store = self._join(settings, show_error, shared or {}, versions or {}, lookups)
        self.watched(
            "joining the process group",
            lambda: dist.init_process_group(
                self.backend,
                store=PrefixStore("paceline", store),
                rank=topology.rank,
                world_size=topology.world_size,
                timeout=timedelta(seconds=settings.timeout_s + BACKEND_GRACE_S),
                device_id=device if self.backend == "nccl" else None,
            ),
        )

    def _join(
        self,
        settings: CommSettings,
        show_error: ShowError | None,
        shared: Mapping[str, Any],
        versions: Mapping[str, str],
        lookups: ExitStack,
    ) -> Store:
        """Returns once all ranks have met, and have opened their watchdog's connection. Rank 0's store
        looks no names up until then."""
        meeting = meet(self.topology, settings.rendezvous_timeout_s, shared, lookups)
        store, self.restarted = meeting.store, meeting.restarted
        self._agreement = Agreement(store, self.topology, settings.rendezvous_timeout_s)
        if self.topology.world_size > 1:
            with explain_lost_store(self.topology.rank, "join"):
                self._hosts = RankHosts.read(store)
                self._watchdog = Watchdog(
                    store, self.topology, settings.timeout_s, self.board, show_error, self._hosts,
                    before_exit=self._forced_exit,
                )  # fmt: skip
        # Everyone is here before the backend connects: a late or dead rank is named, not waited for
        # in the backend's own, unnamed handshake.
        facts = SharedFacts()
        facts.compare(
            {f"version of {name}": version for name, version in versions.items()},
            "install the same software on every node",
        )
        facts.compare(shared)
        facts.compare(
            {"comm.backend": self.backend, "device": self.device.type},
            "use the same kind of device everywhere",
        )
        try:
            self.agree("join", None, facts.values, facts.remedies)
        except PacelineError:
            self._agreement.leave(_LEAVE_WAIT_S)
            if self._watchdog is not None:
                self._watchdog.close()
            raise
        return store

    @property
    def host_leader(self) -> int:
        """The lowest rank on this rank's host."""
        return self._hosts.leader(self.rank)

    @property
    def shares_host(self) -> bool:
        """Whether another rank has this rank's host."""
        return self._hosts.count(self.rank) > 1

    def post_to_host(self, name: str, text: str) -> None:
        """On the leader of a host, before a phase: a text for the other ranks of the host."""
        if self._agreement is not None:
            self._agreement.post(f"host/{self.rank}/{name}", text)

    def read_of_host(self, name: str) -> str:
        """After that phase: what the leader of this host has posted; empty where it has not."""
        if self._agreement is None:
            return ""
        return self._agreement.read(f"host/{self.host_leader}/{name}")

    @property
    def rank(self) -> int:
        return self.topology.rank

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    def all_reduce_sum(self, tensor: Tensor, *, wait: bool = True) -> None:
        """Replaces `tensor` by its sum over ranks, bit-identical on all of them. Without `wait` a
        GPU may not have finished; whoever waits for the device does so under `watched`."""
        if self.backend == "none":
            return
        if wait:
            self.completed("all-reduce", lambda: dist.all_reduce(tensor))
        else:
            self.watched("all-reduce", lambda: dist.all_reduce(tensor))

    def create_subgroup(self, size: int, timeout_s: float) -> Callable[[Tensor], None]:
        """A sum over this rank's neighbours in groups of `size` ranks, one group after the other. All
        ranks call this. The result does not wait for a GPU; over Gloo a sum is complete on return."""
        made: Any = None
        wait = timedelta(seconds=timeout_s + BACKEND_GRACE_S)
        for first in range(0, self.world_size, size):
            members = list(range(first, first + size))
            # Every rank goes through all of them, members or not: torch counts groups to name them.
            make = partial(dist.new_group, members, timeout=wait, backend=self.backend)
            found = self.watched("creating a group of ranks", make)
            made = found if self.rank in members else made

        def all_reduce(tensor: Tensor) -> None:
            self.watched("batch-norm statistics", lambda: dist.all_reduce(tensor, group=made))

        return all_reduce

    def broadcast(self, tensor: Tensor) -> None:
        """Replaces `tensor` by rank 0's."""
        if self.backend != "none":
            self.completed("broadcast", lambda: dist.broadcast(tensor, src=0))

    def gather_rows(self, rows: Tensor, lengths: Sequence[int]) -> None:
        """Completes `rows`, one for each rank, of which this rank has filled its own; `lengths` says how
        many elements of each row count. NCCL's collective can be captured in a CUDA graph, and takes
        whole rows; Gloo, whose all-gather is slower than its broadcasts, sends what counts only."""
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
                work.wait()

        self.watched("all-gather", send)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank."""
        if self.backend == "none":
            assert data is not None
            return data
        length = torch.tensor([len(data) if data is not None else 0], device=self.device)
        self.broadcast(length)
        if data is not None and self.rank == 0:
            content = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8).to(self.device)
        else:
            content = torch.empty(max(1, int(length)), dtype=torch.uint8, device=self.device)
        self.broadcast(content)
        return content.cpu().numpy().tobytes()[: int(length)]

    def gather(self, row: Tensor) -> Tensor | None:
        """Every rank's `row`, one beneath the other, on rank 0's CPU; None elsewhere."""
        if self.backend == "none":
            return row.detach().cpu()[None].clone()
        rows = [torch.empty_like(row) for _ in range(self.world_size)] if self.rank == 0 else None
        self.completed("gather", lambda: dist.gather(row.contiguous(), rows, dst=0))
        # One by one: a stack on the device would take its memory twice.
        return torch.stack([own.cpu() for own in rows]) if rows is not None else None

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """Every rank's bytes, in order of rank, on rank 0; None elsewhere."""
        lengths = self.gather(torch.tensor([len(data)], device=self.device))
        longest = int(lengths.max()) if lengths is not None else 0
        width = int(self.broadcast_bytes(str(longest).encode()))
        row = torch.zeros(max(1, width), dtype=torch.uint8)
        row[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[
            : len(data)
        ]
        # Piece by piece: rank 0's device holds a piece of every rank at a time, not all their bytes.
        piece = max(1, _GATHERED_BYTES // self.world_size)
        parts = [self.gather(own.to(self.device)) for own in torch.split(row, piece)]
        if lengths is None:
            return None
        found = [bytearray() for _ in range(self.world_size)]
        for part in parts:
            assert part is not None
            for own, content in zip(found, part, strict=True):
                own += content.numpy().tobytes()
        sizes = lengths.flatten().tolist()
        return [bytes(own[:size]) for own, size in zip(found, sizes, strict=True)]

    def agree(
        self,
        phase: str,
        error: PacelineError | None = None,
        facts: Mapping[str, Any] | None = None,
        remedy: Remedies = SAME_SETTINGS,
    ) -> None:
        """All ranks continue, or all raise the same error (see `Agreement.agree`)."""
        if self._agreement is not None:
            self._agreement.agree(phase, error, facts, remedy)
        elif error is not None:
            raise error

    @contextmanager
    def phase(self, name: str) -> Iterator[SharedFacts]:
        """All ranks run the block, then all continue or all raise the same error: that of the lowest
        rank on which the block failed, else the first fact that differs. Every phase costs all ranks a
        wait for the slowest one and the store some requests, so a block does all that may fail between
        two collectives, and contains none itself."""
        facts, error = SharedFacts(), None
        try:
            yield facts
        except PacelineError as caught:
            error = caught
        # Without facts there is nothing to compare, which saves a request.
        self.agree(name, error, facts.values or None, facts.remedies)

    def agree_on(self, phase: str, make: Callable[[], Made]) -> Made:
        """The result of `make` on this rank; if it fails on any rank, all raise the same error."""
        made, error = None, None
        try:
            made = make()
        except PacelineError as caught:
            error = caught
        self.agree(phase, error)
        assert made is not None
        return made

    def watch_signals(self, asked_to_stop: Callable[[], bool]) -> None:
        """`asked_to_stop` says whether a signal has asked this process to stop, also while its main
        thread is inside a wait and cannot handle the signal."""
        if self._watchdog is not None:
            self._watchdog.asked_to_stop = asked_to_stop

    def name_buckets(self, buckets: Sequence[BucketInfo]) -> None:
        """How the watchdog describes the buckets of the exchange."""
        if self._watchdog is not None:
            self._watchdog.buckets = buckets

    def post_fault(self, error: PacelineError) -> None:
        """Publishes this rank's error for the other ranks."""
        self._own_fault = error
        if self._agreement is not None:
            self._agreement.post_fault(error)

    def fault(self) -> PacelineError:
        """The error that some rank posted; called once a collective has shown that there is one."""
        found = self._agreement.read_fault(_FAULT_WAIT_S) if self._agreement else self._own_fault
        return found or CommError(
            "a rank failed without posting its error", "look into the ranks' logs"
        )

    def peer_error(self, error: CommError) -> PeerError:
        """For an exchange that broke: the error that the failed rank posted, else `error` itself."""
        suspect = self._suspect(error.cause)
        fault = self._agreement.read_fault(_FAULT_WAIT_S) if self._agreement else None
        if fault:
            return PeerError.from_agreed(fault)
        gone = suspect or self._silent()
        found = PeerError(f"{error.cause}{gone and ': '}{gone}", error.remedy)
        return self._lost(found, bool(gone) and not suspect)

    def announce_stop(self) -> None:
        """This rank was asked to stop. The next collective tells the others; this tells them already
        while they work towards it, which may take minutes."""
        if self._agreement is not None and not self._stop_heard:
            self._stop_heard = True
            self._agreement.announce_stop()

    def stop_announced(self) -> bool:
        """Whether some rank was asked to stop. The heartbeat thread asks the store; this does not."""
        if self._watchdog is not None and self._watchdog.stop_announced:
            self._stop_heard = True
        return self._stop_heard

    def begin_run(self, name: str) -> None:
        """Starts another run in this group, under a name that no run before it had."""
        if self._agreement is not None:
            self._agreement.run = f"{name}/"

    def release_on_abort(self, release: Callable[[], None]) -> None:
        """`release` destroys CUDA graphs that hold collectives of this group."""
        self._release_graphs.append(release)

    def released(self, release: Callable[[], None]) -> None:
        """The graphs of `release` are destroyed."""
        if release in self._release_graphs:
            self._release_graphs.remove(release)

    def leaving(self, error: BaseException) -> None:
        """Before the teardown after an error: from here on the watchdog ends the process with
        `error` where the teardown does not end by itself. NCCL's communicators are aborted where the
        other ranks do not leave at the same point: their kernels, or ours, would wait forever."""
        if self._left:
            return
        self._left = True
        self._device_lost = isinstance(error, DeviceError)
        if self._watchdog is not None:
            self._watchdog.leaving(error)
        self._post_own(error)
        agreed = isinstance(error, PacelineError) and not isinstance(error, PeerError)
        if not agreed:
            self.abort()

    def abort(self) -> None:
        """Ends NCCL's communicators without the other ranks; does nothing for other backends, whose
        connections close with the process."""
        if self.backend == "nccl":
            self.aborted = True
            abort_process_groups(list(self._release_graphs), _ABORT_WAIT_S)

    def before_forced_exit(self, action: Callable[[], None]) -> None:
        """`action` runs in seconds at most before the watchdog ends this process."""
        self._last_actions.append(action)

    def _forced_exit(self) -> None:
        self.abort()
        for action in self._last_actions:
            action()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leaves the group; an error of this rank is posted first."""
        if error is not None:
            self.leaving(error)
        self.close()

    def _post_own(self, error: BaseException) -> None:
        """Posts an error that began on this rank."""
        if isinstance(error, PacelineError) and not isinstance(error, PeerError):
            self.post_fault(error)
        elif isinstance(error, Exception) and not isinstance(error, PacelineError):
            self.post_fault(RunError(f"{type(error).__name__}: {error}", "see its traceback"))

    def close(self) -> None:
        """Leaves the group. Waits for ranks that may be gone for seconds at most."""
        # First the connections, so that a rank that waits in a collective finds out.
        if dist.is_initialized() and not self._device_lost and not self.aborted:
            dist.destroy_process_group()
        if self._agreement is not None:
            self._agreement.leave(_LEAVE_WAIT_S)
        if self._watchdog is not None:
            self._watchdog.close()

    def completed(self, what: str, action: Callable[[], object]) -> None:
        """`watched`, until the collective has ended on the device. NCCL's calls return once the work is
        queued; the wait for a lost rank would come later, unwatched."""

        def complete() -> None:
            action()
            if self.backend == "nccl":
                torch.cuda.current_stream(self.device).synchronize()

        self.watched(what, complete)

    def watched(self, what: str, action: Callable[[], Made]) -> Made:
        """Runs a collective under the watchdog and returns its result. If it fails, raises a
        `PeerError` that names the rank that failed and why, where that is known."""
        try:
            with self.board.during(what):
                result = action()
                if self._watchdog is not None:
                    self._watchdog.hold_if_ending()
            return result
        except torch.AcceleratorError:
            raise  # this rank's own device failed; no other rank is to blame
        except RuntimeError as error:
            suspect = self._suspect(str(error))
            fault = self._agreement.read_fault(_FAULT_WAIT_S) if self._agreement else None
            if fault is not None:
                raise PeerError.from_agreed(fault) from error
            gone = suspect or self._silent()
            raise self._lost(
                PeerError(
                    f"{what} broke on rank {self.rank}: {gone or 'another rank is gone'} "
                    f"({backend_reason(error)})",
                    "the log of the first rank to fail has the cause; resume with --resume auto",
                ),
                bool(gone) and not suspect,
            ) from error

    def _lost(self, error: PeerError, is_certain: bool) -> PeerError:
        """Where the lost ranks are known for certain, posts that, so that ranks whose own connections
        still stand end with the same line, and without a search of their own."""
        if not is_certain or self._agreement is None:
            return error
        self._agreement.post_fault(error)
        first = self._agreement.read_fault()
        return error if first is None else PeerError.from_agreed(first)

    def _suspect(self, error: str) -> str:
        """Who is gone, by the peer's address in the backend's error; empty where that is unknown."""
        for address in re.findall(r"\[?([0-9a-fA-F.:]+)\]?:\d+", error):
            suspect = self._hosts.gone_text(address)
            if suspect and self._agreement is not None:
                return self._agreement.first_suspect(suspect)
        return ""

    def lost_client(self) -> str:
        """After this rank's device failed: which rank is gone, where ranks share a GPU; else empty. Under
        MPS a client that is killed can break the GPU for all others."""
        return self._silent() if self._share_gpus else ""

    def _silent(self) -> str:
        """Who is gone, as another rank has found, or because it does not answer; empty where all
        answer."""
        known = self._agreement.known_suspect() if self._agreement is not None else ""
        if known:
            return known
        ranks = self._watchdog.silent_ranks() if self._watchdog is not None else set()
        if self._agreement is None:
            return ""
        if not ranks:
            return self._suspect_of_reader()
        verb = "gives" if len(ranks) == 1 else "give"
        return self._agreement.first_suspect(f"{format_ranks(ranks)} {verb} no sign of life")

    def _suspect_of_reader(self) -> str:
        """Where ranks are many one of them reads all heartbeats, and the others wait for what it
        finds."""
        assert self._agreement is not None
        waits = 0 if self._watchdog is None or self._watchdog.all_read else _SUSPECT_WAITS
        for _ in range(waits):
            if known := self._agreement.known_suspect():
                return known
            time.sleep(_SUSPECT_PAUSE_S)
        return self._agreement.known_suspect()


def choose_backend(settings: CommSettings, topology: Topology, device: torch.device) -> str:
    """`auto` means NCCL on GPUs, Gloo elsewhere, and none for a process that stands alone."""
    if topology.launcher == "single" and topology.world_size == 1:
        return "none"
    backend = settings.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        raise CommError(
            "comm.backend = 'nccl' needs CUDA devices and a torch built with NCCL",
            "use --set comm.backend=gloo",
        )
    return backend
