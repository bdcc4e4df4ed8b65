"""`Group`: all ranks of a run, their collectives, and the handling of errors of single ranks.

A single process without a launcher is a group of one rank, which needs no backend of
torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.comm.collectives import Collectives, Made, abort_process_groups, backend_reason
from paceline.comm.peer_errors import (
    SAME_SETTINGS,
    LostMemberError,
    PeerError,
    Remedies,
    ShowError,
)
from paceline.comm.progress import BucketInfo, ProgressBoard
from paceline.comm.settings import CommSettings
from paceline.core.errors import CommError, DeviceError, PacelineError, RunError
from paceline.core.extensions import load_part
from paceline.core.host import no_thread
from paceline.core.topology import Topology

# How often a wait for a collective looks if a rank is lost.
_LOOK_AGAIN = timedelta(seconds=0.3)

if TYPE_CHECKING:
    from paceline.comm.agreement import Agreement
    from paceline.comm.generations import Generation
    from paceline.comm.membership import Membership
    from paceline.comm.watchdog import LostRanks, Watchdog


class SharedFacts:
    """Collects values that must be equal on all ranks, in a block of `Group.phase`."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.remedies: dict[str, str] = {}

    def compare(self, facts: Mapping[str, Any], remedy: str = SAME_SETTINGS) -> None:
        """Adds values that all ranks compare at the end of the block of `Group.phase`.

        Args:
            facts: Values that must be equal on all ranks, by name.
            remedy: What the user can do if one of them differs.
        """
        self.values |= facts
        self.remedies |= dict.fromkeys(facts, remedy)


class Group(Collectives):
    """The ranks of a run: runs collectives, and makes all ranks raise the same errors.

    All ranks call every method except `close` in the same order.

    Args:
        topology: This rank, and the address of the rendezvous.
        settings: The section `[comm]`.
        device: The device of this rank's tensors.
        show_error: Shows an error if the watchdog ends this process.
        shared: Settings that must be equal on all ranks. They also help to recognize ranks of another
            job at the same port.
        versions: Version of each software package, which must be equal on all ranks.
        elastic: True if the program calls `regroup` after a `LostMemberError`; otherwise
            `comm.min_ranks` has no effect.

    Raises:
        CommError: If the ranks cannot meet or this process already has a process group.
        AgreedError: If a rank failed, or if settings or versions differ between ranks.
    """

    def __init__(
        self,
        topology: Topology,
        settings: CommSettings,
        device: torch.device,
        show_error: ShowError | None = None,
        shared: Mapping[str, Any] | None = None,
        versions: Mapping[str, str] | None = None,
        *,
        elastic: bool = False,
    ) -> None:
        if not elastic:
            settings = replace(settings, min_ranks=0)
        super().__init__(topology, device, choose_backend(settings, topology, device))
        # Observes the exchange; the watchdog reads this rank's progress from the board.
        self.board = ProgressBoard()
        self._watchdog: Watchdog | None = None
        self._lost: LostRanks | None = None
        self._agreement: Agreement | None = None
        self._members: Membership | None = None
        self._own_fault: PacelineError | None = None
        self._stop_heard = False
        # Functions that destroy CUDA graphs with collectives; see `abort`.
        self._release_graphs: list[Callable[[], None]] = []
        self._left = self._device_lost = False
        self._share_gpus = settings.share_gpus
        # True if the process groups have been aborted and so must not be destroyed.
        self.aborted = False
        # True on rank 0 if the launcher has restarted the ranks of this job.
        self.restarted = False
        if self.backend == "none":
            return
        if dist.is_initialized():
            raise CommError(
                "this process already has a torch.distributed process group",
                "close the earlier pl.init() context or pl.Trainer run first",
            )
        facts = SharedFacts()
        facts.compare(
            {f"version of {name}": version for name, version in (versions or {}).items()},
            "install the same software on every node",
        )
        facts.compare(shared or {})
        facts.compare(
            {"comm.backend": self.backend, "device": self.device.type},
            "use the same kind of device everywhere",
        )
        join = load_part("comm.membership:Membership", "comm.backend", self.backend)
        members: Membership = join(
            topology, settings, self.backend, self.board, shared or {}, facts.values, facts.remedies,
            show_error, self.abort,
        )  # fmt: skip
        self._members = members
        self._take_members(members)
        self.restarted = members.restarted
        self.watched("joining the process group", lambda: members.connect(device))

    def _take_members(self, members: Membership) -> None:
        self.topology = members.topology
        self.rank, self.world_size = self.topology.rank, self.topology.world_size
        self._agreement, self._watchdog = members.agreement, members.watchdog
        self._lost = members.lost

    def lost_client(self) -> str:
        """Describes the ranks that do not answer, after this rank's device has failed.

        Returns "" if all ranks answer or if ranks do not share GPUs. Under MPS, a killed process can
        break the GPU for all processes that share it.
        """
        return self._lost.silent() if self._share_gpus and self._lost is not None else ""

    @property
    def generation(self) -> Generation | None:
        """The ranks of the job since the last loss; None if the job ends when a rank is lost."""
        generations = self._members.generations if self._members is not None else None
        return None if generations is None else generations.current

    def describe_losses(self) -> str:
        """Describes why each lost rank was lost, such as `rank 3 was ended by SIGKILL`."""
        assert self._members is not None
        assert self._members.generations is not None
        return self._members.generations.describe_losses()

    def finish(self) -> None:
        """Records, for supervisors, that all ranks have completed the run. Called on one rank."""
        if self._members is not None and self._members.generations is not None:
            self._members.generations.finish()

    @property
    def connect_s(self) -> float | None:
        """The time limit in seconds to connect a process group; None means that of a collective."""
        return None if self._members is None else self._members.connect_s

    def recorded(self) -> AbstractContextManager[None]:
        """Returns a context in which process groups are created that the loss of a rank has to end."""
        return nullcontext() if self._members is None else self._members.recorded()

    def regroup(self) -> None:
        """Connects the remaining ranks in new process groups, after a `LostMemberError`.

        Ranks keep their order but get new numbers, which this object then has. A collective that was
        abandoned may still write into its old buffers.

        Raises:
            PeerError: If the survivors cannot continue, or another rank is lost at that time.
        """
        members, watchdog = self._members, self._watchdog
        assert members is not None
        self.board.reset()
        members.regroup(self.device)
        self._take_members(members)
        if watchdog is not None and self._watchdog is not None:
            self._watchdog.asked_to_stop = watchdog.asked_to_stop
            self._watchdog.buckets = watchdog.buckets
        if self._own_fault is not None:
            self.post_fault(self._own_fault)

    def await_work(self, work: Any) -> None:
        """Waits for a collective; after a loss, only for a moment.

        Gloo can wait for a message to a lost rank until the group's time-out, although all connections
        have ended.
        """
        generations = self._members.generations if self._members is not None else None
        while generations is not None and self.backend == "gloo":
            try:
                work.wait(_LOOK_AGAIN)
                return
            except RuntimeError:
                if work.is_completed() or generations.lost_within(0.0):
                    raise
        work.wait()

    def _loss(self) -> LostMemberError | None:
        """Returns the error for a collective that failed because a rank is lost, or None.

        A rank that ends with an error of its own has posted it, and ends the job.
        """
        generations = self._members.generations if self._members is not None else None
        if generations is None or not generations.lost_within():
            return None
        if self._agreement is not None and self._agreement.read_fault() is not None:
            return None
        return LostMemberError(generations.describe_losses())

    def agree(
        self,
        phase: str,
        error: PacelineError | None = None,
        facts: Mapping[str, Any] | None = None,
        remedy: Remedies = SAME_SETTINGS,
    ) -> None:
        """Makes all ranks continue, or all raise the same error (see `Agreement.agree`)."""
        if self._agreement is not None:
            self._agreement.agree(phase, error, facts, remedy)
        elif error is not None:
            raise error

    @contextmanager
    def phase(self, name: str) -> Iterator[SharedFacts]:
        """Runs a block on all ranks; then all ranks continue, or all raise the same error.

        All ranks raise the error of the lowest rank on which the block failed. If no block failed, the
        error names the first fact that differs. In every phase all ranks wait for the slowest rank and
        make some requests to the store. So a block should contain everything that can fail between two
        collectives, but no collective.
        """
        facts, error = SharedFacts(), None
        try:
            yield facts
        except PacelineError as caught:
            error = caught
        # Without facts there is nothing to compare, which saves a request.
        self.agree(name, error, facts.values or None, facts.remedies)

    def agree_on(self, phase: str, make: Callable[[], Made]) -> Made:
        """Returns the result of `make`; if it fails on any rank, all ranks raise the same error."""
        with self.phase(phase):
            return make()

    def watch_signals(self, asked_to_stop: Callable[[], bool]) -> None:
        """Sets the function that returns True once a signal has asked this process to stop.

        The function must also work while the main thread waits in C code and cannot handle the
        signal.
        """
        if self._watchdog is not None:
            self._watchdog.asked_to_stop = asked_to_stop

    def name_buckets(self, buckets: Sequence[BucketInfo]) -> None:
        """Sets the description of each gradient bucket, which the watchdog uses in error messages."""
        if self._watchdog is not None:
            self._watchdog.buckets = buckets

    def post_fault(self, error: PacelineError) -> None:
        """Publishes this rank's error for the other ranks."""
        self._own_fault = error
        if self._agreement is not None:
            self._agreement.post_fault(error)

    def fault(self) -> PacelineError:
        """Returns the error that a rank has posted.

        Called after the result of a collective has shown that some rank failed.
        """
        error = self._lost.posted_fault() if self._lost is not None else self._own_fault
        return error or CommError(
            "a rank failed without posting its error", "look into the ranks' logs"
        )

    def announce_stop(self) -> None:
        """Tells the other ranks that this rank was asked to stop.

        The next collective also transmits the stop, but the ranks may need minutes to reach it.
        """
        if self._agreement is not None and not self._stop_heard:
            self._stop_heard = True
            self._agreement.announce_stop()

    def stop_announced(self) -> bool:
        """Returns True if a rank was asked to stop. Sends no request to the store."""
        if self._watchdog is not None and self._watchdog.stop_announced:
            self._stop_heard = True
        return self._stop_heard

    def begin_run(self, name: str) -> None:
        """Starts another run in this group. `name` must differ from the names of earlier runs."""
        if self._agreement is not None:
            self._agreement.run = f"{name}/"

    def release_on_abort(self, release: Callable[[], None]) -> None:
        """Registers a function that destroys CUDA graphs with this group's collectives, for `abort`."""
        self._release_graphs.append(release)

    def released(self, release: Callable[[], None]) -> None:
        """Removes a function that `release_on_abort` has registered; its graphs were destroyed."""
        if release in self._release_graphs:
            self._release_graphs.remove(release)

    def leaving(self, error: BaseException) -> None:
        """Prepares to leave after an error. The watchdog ends the process if that takes too long.

        Aborts NCCL's communicators unless the error makes all ranks leave at the same point. Without the
        abort, kernels could wait forever for another rank.
        """
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
        """Aborts NCCL's communicators without waiting for the other ranks.

        Does nothing for other backends, whose connections close with the process.
        """
        if self.backend == "nccl":
            self.aborted = True
            abort_process_groups(list(self._release_graphs))

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leaves the group. If the block raised an error on this rank, posts the error first."""
        if error is not None:
            self.leaving(error)
        self.close()

    def _post_own(self, error: BaseException) -> None:
        """Posts `error` to the other ranks if this rank caused it."""
        if isinstance(error, PacelineError) and not isinstance(error, PeerError):
            self.post_fault(error)
        elif isinstance(error, Exception) and not isinstance(error, PacelineError):
            unknown = RunError(f"{type(error).__name__}: {error}", "see the traceback in its log")
            self.post_fault(no_thread(error) or unknown)

    def close(self) -> None:
        """Leaves the group. Waits only a few seconds for ranks that may be gone."""
        # First the connections, so that a rank that waits in a collective finds out.
        joined = self.backend != "none" and dist.is_initialized()
        if joined and not self._device_lost and not self.aborted:
            dist.destroy_process_group()
        if self._members is not None:
            self._members.close()

    def watched(self, what: str, action: Callable[[], Made]) -> Made:
        """Runs a collective under the watchdog and returns its result.

        Raises:
            PeerError: If the collective fails. The error names the failed rank and the cause, if
                known.
        """
        try:
            with self.board.during(what):
                result = action()
                if self._watchdog is not None:
                    self._watchdog.hold_if_ending()
            return result
        except torch.AcceleratorError:
            raise  # this rank's own device failed; no other rank is to blame
        except RuntimeError as error:
            if (loss := self._loss()) is not None:
                raise loss from error
            if self._lost is not None:
                raise no_thread(error) or self._lost.broken(what, error) from error
            alone = PeerError(f"{what} broke on rank {self.rank} ({backend_reason(error)})")
            raise no_thread(error) or alone from error

    def peer_error(self, error: CommError) -> PeerError:
        """Returns the error for a failed exchange: the failed rank's error if known, else `error`."""
        if (loss := self._loss()) is not None:
            return loss
        if self._lost is None:
            return PeerError(error.cause, error.remedy)
        return self._lost.peer_error(error)


def choose_backend(settings: CommSettings, topology: Topology, device: torch.device) -> str:
    """Returns the backend: `nccl`, `gloo`, or `none` for a single process without a launcher.

    The setting `auto` means NCCL on GPUs and Gloo on CPUs.
    """
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
