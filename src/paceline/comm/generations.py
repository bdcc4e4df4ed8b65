"""`Generations`: continues a job with the remaining ranks (a new generation) after ranks were lost.

A job is a sequence of generations. A generation has fixed members: ranks of the first generation,
which keep their numbers. The log of losses (`LossLog`) decides the members of each generation, and its
length is the generation's number. When a member of the current generation is lost, a thread that waits
for the next entry of the log ends this rank's collectives: it shuts down the sockets of the process
groups, and ends phases of an agreement. The training thread then forms the next generation (`form`).
Survivors meet under a prefix of the store that only this generation uses. One key decides whether the
generation begins, so that either all of its members connect, or none: the last member to arrive writes
`go`, and a member that reads of another loss before that writes `stale`.

While no member is lost, this makes no request to the store.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.comm.agreement import ActiveClock, came, peek
from paceline.comm.job import Attendance
from paceline.comm.losses import LossLog
from paceline.comm.peer_errors import PeerError
from paceline.core.errors import ConfigError
from paceline.core.topology import Topology
from paceline.core.untrusted import ParseError, parse_json

# The supervisor that started this rank sets this variable. It reports lost ranks and keeps the others.
SUPERVISOR_VARIABLE = "PACELINE_SUPERVISOR"
# Time limit for the connections of a new generation. All members are alive when they start to connect.
CONNECT_S = 60.0
# How long a rank whose collective failed waits until a supervisor has reported the lost rank.
_REPORT_S = 10.0
_SLICE_S = 30.0
_NODE, _NODES = "paceline/elastic/node", "paceline/elastic/nodes"
_SOCKETS = Path("/proc/self/fd")
_GO, _STALE = "go", "stale"
# How long `close` waits for the listener.
_END_WAIT_S = 2.0


def check_supervisor(min_ranks: int) -> None:
    """Raises ConfigError if `comm.min_ranks` is set but the launcher ends all ranks when one is lost."""
    if SUPERVISOR_VARIABLE not in os.environ:
        raise ConfigError(
            "comm.min_ranks", min_ranks, "this launcher ends all ranks when one is lost",
            "use paceline train --nproc-per-node N --min-ranks M, or set it to 0",
        )  # fmt: skip


class GroupSockets:
    """The sockets of process groups, or of a store, which `shut_down` closes for both ends.

    Gloo has no call that ends a collective which waits for another rank. After its sockets are shut down,
    the collective fails on this rank and on the rank at the other end. Works on Linux only; elsewhere the
    other ranks notice a lost rank when a neighbor's connections end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[int, str] = {}
        self._before: dict[int, str] | None = None

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Records the sockets that are opened in this context."""
        with self._lock:
            self._before = _open_sockets()
        try:
            yield
        finally:
            with self._lock:
                self._made |= self._new()
                self._before = None

    def shut_down(self) -> None:
        """Shuts the recorded sockets down, also those that are being opened at the moment."""
        with self._lock:
            now = _open_sockets()
            # A number may belong to another socket by now.
            own = {fd for fd, name in (self._made | self._new()).items() if now.get(fd) == name}
            self._made = {}
        for fd in own:
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                # The shutdown of a listening socket would end the process.
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)

    def _new(self) -> dict[int, str]:
        if self._before is None:
            return {}
        before = self._before
        return {fd: name for fd, name in _open_sockets().items() if before.get(fd) != name}


def _open_sockets() -> dict[int, str]:
    """Returns the file descriptors of this process's sockets, each with a name that is never reused."""
    found = {}
    with suppress(OSError):
        for entry in _SOCKETS.iterdir():
            with suppress(OSError):
                if (name := str(entry.readlink())).startswith("socket:"):
                    found[int(entry.name)] = name
    return found


@dataclass(frozen=True)
class Generation:
    """The ranks of a job between two losses of ranks.

    Attributes:
        number: Length of the log of losses from which the members follow.
        members: The ranks of the first generation that are left, in order. Their places are their
            ranks in this generation.
        topology: This rank in the generation.
        store: The store, with a prefix that only this generation uses.
    """

    number: int
    members: tuple[int, ...]
    topology: Topology
    store: Store

    @property
    def member(self) -> int:
        """This process's rank in the first generation."""
        return self.members[self.topology.rank]


class Generations:
    """Watches for lost ranks, and forms the next generation of a job from the remaining ranks.

    Args:
        store: The store of the first generation.
        topology: This rank in the first generation.
        timeout_s: How long survivors wait for a member that neither arrives nor is lost.
    """

    def __init__(self, store: Store, topology: Topology, timeout_s: float) -> None:
        self._store, self._first, self._timeout_s = store, topology, timeout_s
        self.sockets = GroupSockets()
        # Ends phases of the agreement of the current generation.
        self.interrupt: Callable[[], None] = lambda: None
        everybody = tuple(range(topology.world_size))
        self.current = Generation(0, everybody, topology, store)
        self._log = LossLog(_without_prefix(store))
        # The listener waits on a separate connection.
        self._connection = GroupSockets()
        with self._connection.recorded():
            self._heard_store: Store = store.clone()  # type: ignore[attr-defined] # not in torch's stubs
        self._heard = LossLog(_without_prefix(self._heard_store))
        self._forming: Generation | None = None
        self._lock = threading.Lock()
        self._lost = threading.Event()
        store.set(f"{_NODE}/{topology.rank}", str(topology.node_rank))
        self._thread = threading.Thread(target=self._listen, name="paceline-losses", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread that waits for losses.

        A wait for the store that returns while the interpreter exits would end the process with
        `std::terminate`.
        """
        self._connection.shut_down()
        self._thread.join(_END_WAIT_S)

    def lost_within(self, limit_s: float = _REPORT_S) -> bool:
        """Waits until a loss of a rank of this generation is reported; False after `limit_s` seconds."""
        return self._lost.wait(limit_s)

    def describe_losses(self) -> str:
        """Returns the causes of all losses that this rank has read of, without remedies."""
        causes = [cause.partition(";")[0] for cause in self._heard.lost.values()]
        return ", ".join(dict.fromkeys(causes))

    def begin(self) -> None:
        """Records that all ranks have met. Before that, the supervisors end all ranks if one is lost."""
        # Otherwise each rank would read the keys of all ranks.
        if self._first.rank == 0 and not self._log.has_begun():
            keys = [f"{_NODE}/{rank}" for rank in range(self._first.world_size)]
            nodes = [int(text) for text in self._store.multi_get(keys)]
            self._store.set(_NODES, json.dumps(nodes))
            self._log.begin()

    def finish(self) -> None:
        """Records that all remaining ranks have completed the run."""
        self._log.finish()

    def evict(self, rank: int, why: str) -> None:
        """Asks the supervisor of a late rank of this generation to end it and to report the loss."""
        member = self.current.members[rank]
        # Another thread may be waiting on the main connection.
        self._log.own_connection().evict(member, f"rank {member} {why}")

    def form(self, connect: Callable[[Generation], None]) -> None:
        """Connects all remaining ranks as the next generation.

        Args:
            connect: Connects the process groups of a generation; may raise RuntimeError.

        Raises:
            PeerError: If the survivors cannot continue, because rank 0 is lost, or because a member
                that is not lost cannot be reached.
        """
        while True:
            self._log.read()
            generation = self._next()
            with self._lock:
                self._forming = generation
                if self._heard.length > generation.number:
                    continue
                self._lost.clear()
            if not self._all_arrive(generation):
                continue
            try:
                connect(generation)
            except RuntimeError as error:
                failure = str(error)
            else:
                with self._lock:
                    self.current, self._forming = generation, None
                return
            abandon_process_groups()
            if not self.lost_within():
                raise PeerError(
                    f"rank {generation.member} cannot connect to the remaining ranks ({failure[:160]})",
                    "resume with --resume auto",
                )

    def _next(self) -> Generation:
        """Returns the next generation, by the log of losses as far as this thread has read it."""
        lost, first = self._log.lost, self._first
        if 0 in lost:
            raise PeerError(lost[0] or "rank 0 is lost", "resume with --resume auto")
        members = tuple(rank for rank in range(first.world_size) if rank not in lost)
        if first.rank not in members:
            raise PeerError(
                f"the other ranks continue without rank {first.rank}: {lost[first.rank]}",
                "look into the log of the job's rank 0",
            )
        nodes = parse_json(self._store.get(_NODES))
        if not isinstance(nodes, list) or len(nodes) != first.world_size:
            raise ParseError("is no list of nodes")
        rank = members.index(first.rank)
        here = [place for place, own in enumerate(members) if nodes[own] == first.node_rank]
        topology = replace(
            first, rank=rank, world_size=len(members), local_rank=here.index(rank),
            local_world_size=len(here),
        )  # fmt: skip
        number = self._log.length
        return Generation(
            number, members, topology, PrefixStore(f"generation-{number}", self._store)
        )

    def _all_arrive(self, generation: Generation) -> bool:
        """Waits for all members of a generation; returns False if another member is lost before."""
        store, clock = generation.store, ActiveClock(longest_s=2 * _SLICE_S)
        attendance = Attendance(store, "arrived", len(generation.members))
        if attendance.arrive(generation.topology.rank):
            store.compare_set("ready", "", _GO)
        evicted = False
        while not came(store, "ready", min(_SLICE_S, self._timeout_s)):
            if clock.now_s() > self._timeout_s and not evicted:
                evicted = True
                for rank in attendance.missing():
                    member = generation.members[rank]
                    why = f"did not meet the remaining ranks within {self._timeout_s:g} s"
                    self._log.evict(member, f"rank {member} {why}")
        return peek(store, "ready") == _GO

    def _listen(self) -> None:
        """Ends this rank's collectives when another rank is lost. Runs in a thread."""
        # If the store ends with its host, the watchdog reports that.
        with suppress(RuntimeError, ParseError):
            while True:
                if not self._heard.wait():
                    continue
                with self._lock:
                    generation = self._forming or self.current
                    if self._heard.lost.keys().isdisjoint(generation.members):
                        continue
                    self._lost.set()
                if generation is self._forming:
                    name = f"generation-{generation.number}"
                    PrefixStore(name, self._heard_store).compare_set("ready", "", _STALE)
                self.sockets.shut_down()
                self.interrupt()


def _without_prefix(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def abandon_process_groups() -> None:
    """Leaves all process groups without waiting for their collectives.

    The groups end on a thread, because the end of a group waits for its unfinished collectives.
    """
    groups = [*distributed_c10d._world.pg_map]
    if dist.is_initialized():
        dist.destroy_process_group()
    threading.Thread(target=groups.clear, name="paceline-abandon", daemon=True).start()
