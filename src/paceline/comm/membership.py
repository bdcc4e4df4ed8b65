"""`Membership`: joins the ranks of a job, and creates the agreement and the watchdog of this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from paceline.comm.agreement import Agreement, explain_lost_store
from paceline.comm.generations import (
    CONNECT_S,
    Generation,
    Generations,
    abandon_process_groups,
    check_supervisor,
)
from paceline.comm.job import RankHosts
from paceline.comm.peer_errors import LostMemberError, Remedies, ShowError
from paceline.comm.process_groups import init_default_group, prepare_nccl
from paceline.comm.progress import ProgressBoard
from paceline.comm.rendezvous import meet
from paceline.comm.settings import BACKEND_GRACE_S, CommSettings
from paceline.comm.watchdog import LostRanks, Watchdog
from paceline.core.errors import PacelineError
from paceline.core.host import DeferredEnd, no_thread
from paceline.core.topology import Topology


class Membership:
    """Joins the rendezvous, starts the watchdog, and checks that all ranks have the same settings.

    Args:
        topology: This rank, and the address of the rendezvous.
        settings: The section `[comm]`.
        backend: `nccl` or `gloo`.
        board: Records this rank's progress, which the watchdog reads.
        shared: Settings that are equal on all ranks of the job, to recognize ranks of another job.
        facts: Values that must be equal on all ranks.
        remedy: What the user can do if facts differ.
        show_error: Shows an error if the watchdog ends this process.
        before_exit: Function that runs before the watchdog ends this process.
    """

    def __init__(
        self,
        topology: Topology,
        settings: CommSettings,
        backend: str,
        board: ProgressBoard,
        shared: Mapping[str, Any],
        facts: Mapping[str, Any],
        remedy: Remedies,
        show_error: ShowError | None,
        before_exit: Callable[[], None],
    ) -> None:
        if backend == "nccl":
            prepare_nccl(topology, share_gpus=settings.share_gpus)
        if settings.min_ranks:
            check_supervisor(settings.min_ranks)
        self.topology, self._backend, self._settings = topology, backend, settings
        self._board, self._show_error, self._before_exit = board, show_error, before_exit
        self._wait_s = settings.timeout_s + BACKEND_GRACE_S
        self.hosts, self.watchdog = RankHosts(), None
        # None if the job ends when a rank is lost.
        self.generations: Generations | None = None
        with ExitStack() as lookups:
            with DeferredEnd(active=not topology.ends_together) as end:
                meeting = meet(topology, settings.rendezvous_timeout_s, shared, lookups, end)
            self._store, self.restarted = meeting.store, meeting.restarted
            self.agreement = Agreement(self._store, topology, settings.rendezvous_timeout_s)
            failed: PacelineError | None = None
            if topology.world_size > 1:
                try:
                    with explain_lost_store(topology.rank, "join"):
                        self.hosts = self._all_hosts = RankHosts.read(self._store)
                        if settings.min_ranks:
                            self.generations = Generations(
                                self._store, topology, settings.timeout_s
                            )
                            self.generations.interrupt = self._interrupt
                        self.watchdog = self._create_watchdog()
                except RuntimeError as error:
                    failed = no_thread(error)
                    if failed is None:
                        raise
            self.lost = LostRanks(topology.rank, self.agreement, self.watchdog, self.hosts)
            # All ranks agree before the backend connects, so that errors name a late or dead rank. The
            # backend would wait for this rank without naming it.
            try:
                self.agreement.agree("join", failed, facts, remedy)
            except PacelineError:
                self.close()
                raise

    def close(self) -> None:
        """Leaves the job and ends the threads of this object."""
        self.agreement.leave()
        if self.watchdog is not None:
            self.watchdog.close()
        if self.generations is not None:
            self.generations.close()

    def connect(self, device: torch.device) -> None:
        """Creates the default process group of torch.distributed."""
        with self.recorded():
            # The end of a separate connection to the store ends the wait for a rank that is lost then.
            store = self._store if self.generations is None else self._store.clone()  # type: ignore[attr-defined]
            init_default_group(
                self._backend, store, self.topology, self._wait_s, device, self.connect_s
            )
        if self.generations is not None:
            self.generations.begin()

    @property
    def connect_s(self) -> float | None:
        """The time limit in seconds to connect a process group; None means that of a collective."""
        return None if self.generations is None else CONNECT_S

    def recorded(self) -> AbstractContextManager[None]:
        """Records the sockets of process groups that are created in this context."""
        return nullcontext() if self.generations is None else self.generations.sockets.recorded()

    def regroup(self, device: torch.device) -> None:
        """Connects the remaining ranks in new process groups, after ranks were lost.

        Raises:
            PeerError: If the survivors cannot continue.
        """
        generations = self.generations
        assert generations is not None
        if self.watchdog is not None:
            self.watchdog.close()
        generations.sockets.shut_down()
        abandon_process_groups()

        def connect(generation: Generation) -> None:
            self._store, self.topology = generation.store, generation.topology
            self.connect(device)

        with explain_lost_store(self.topology.rank, "the next generation"):
            generations.form(connect)
            self._follow(generations)

    def _follow(self, generations: Generations) -> None:
        """Creates the agreement and the watchdog for the ranks of the current generation."""
        before = self.agreement
        self.agreement = Agreement(self._store, self.topology, self._settings.rendezvous_timeout_s)
        self.agreement.run = before.run
        self.hosts = self._all_hosts.only(generations.current.members)
        self.watchdog = self._create_watchdog()
        self.lost = LostRanks(self.topology.rank, self.agreement, self.watchdog, self.hosts)
        if generations.lost_within(0.0):
            self._interrupt()  # the listener has interrupted the agreement of the previous generation

    def _create_watchdog(self) -> Watchdog | None:
        if self.topology.world_size == 1:
            return None
        generations = self.generations
        return Watchdog(
            self._store, self.topology, self._settings.timeout_s, self._board, self._show_error,
            self.hosts, before_exit=self._before_exit,
            evict=None if generations is None else generations.evict,
        )  # fmt: skip

    def _interrupt(self) -> None:
        assert self.generations is not None
        self.agreement.interrupt(LostMemberError(self.generations.describe_losses()))
