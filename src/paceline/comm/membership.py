"""`Membership`: joins the ranks of a job, and creates the agreement and the watchdog of this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from paceline.comm.agreement import Agreement, explain_lost_store
from paceline.comm.job import RankHosts
from paceline.comm.peer_errors import Remedies, ShowError
from paceline.comm.process_groups import init_default_group, prepare_nccl
from paceline.comm.progress import ProgressBoard
from paceline.comm.rendezvous import meet
from paceline.comm.settings import BACKEND_GRACE_S, CommSettings
from paceline.comm.watchdog import LostRanks, Watchdog
from paceline.core.errors import PacelineError
from paceline.core.host import DeferredEnd, no_thread
from paceline.core.topology import Topology


class Membership:
    """Joins the rendezvous, starts the watchdog, and agrees with the other ranks on the first phase.

    Args:
        topology: This rank, and the address of the rendezvous.
        settings: The section `[comm]`.
        backend: `nccl` or `gloo`.
        board: The progress that the watchdog reads.
        shared: Settings that are equal on all ranks of the job, to recognize ranks of another job.
        facts: Values that must be equal on all ranks; they are compared in the first phase.
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
        self._topology, self._backend = topology, backend
        self._wait_s = settings.timeout_s + BACKEND_GRACE_S
        self.hosts, self.watchdog = RankHosts(), None
        with ExitStack() as lookups:
            with DeferredEnd(active=not topology.ends_together) as end:
                meeting = meet(topology, settings.rendezvous_timeout_s, shared, lookups, end)
            self._store, self.restarted = meeting.store, meeting.restarted
            self.agreement = Agreement(self._store, topology, settings.rendezvous_timeout_s)
            failed: PacelineError | None = None
            if topology.world_size > 1:
                try:
                    with explain_lost_store(topology.rank, "join"):
                        self.hosts = RankHosts.read(self._store)
                        self.watchdog = Watchdog(
                            self._store, topology, settings.timeout_s, board, show_error,
                            self.hosts, before_exit=before_exit,
                        )  # fmt: skip
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
                self.agreement.leave()
                if self.watchdog is not None:
                    self.watchdog.close()
                raise

    def connect(self, device: torch.device) -> None:
        """Creates the default process group of torch.distributed."""
        init_default_group(self._backend, self._store, self._topology, self._wait_s, device)
