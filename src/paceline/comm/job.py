"""Identifies the job of a rank, the host of each rank, and the ranks that have reached a point.

Ranks of two jobs that use the same port by mistake must not join. Most launchers give the job an id. If
both ids are known, they decide whether two ranks belong to the same job. Otherwise the settings that all
ranks share decide. Values that can differ between ranks of one job are not compared: restart counts,
hosts, and a node's own paths and worker counts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import Store

from paceline.core.topology import Topology
from paceline.core.untrusted import ParseError, is_count, parse_json

_NAMED_SETTINGS = 3
# Limits for values that are read from the store; far more than any job needs.
_MOST_RANKS = 1 << 20
_LONGEST_NAME = 1000
# For each launcher, the variables that can contain the job's id; the first one that is set counts.
_ID_VARIABLES = {
    "torchrun": ("TORCHELASTIC_RUN_ID",),
    "openmpi": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    "mpi": ("PMI_JOBID", "PALS_APID"),
}
# torchrun uses this id for every job without --rdzv-id.
_NO_RUN_ID = "none"
_HOSTS_KEY = "paceline/hosts"
_NAMED_HOSTS = 4
_NAMED_RUNS = 12


@dataclass(frozen=True)
class JobIdentity:
    """Identifies the job that a rank belongs to.

    `job_id` is empty if the launcher gives the job no id. `settings` contains the settings that are equal
    on all ranks; it is empty if the program has no such settings.
    """

    launcher: str
    job_id: str
    world_size: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    host: str = ""
    pid: int = 0

    @classmethod
    def from_env(
        cls, env: Mapping[str, str], topology: Topology, settings: Mapping[str, Any] | None = None
    ) -> JobIdentity:
        return cls(
            topology.launcher,
            _job_id(env, topology.launcher),
            topology.world_size,
            # Converted as JSON converts them (tuples to lists), because other ranks receive JSON.
            json.loads(json.dumps(dict(settings or {}), default=str)),
            socket.gethostname(),
            os.getpid(),
        )

    def to_table(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_table(cls, table: object) -> JobIdentity:
        """Builds the identity from the result of `to_table`. Raises ParseError if `table` is invalid."""
        if not isinstance(table, dict) or table.keys() != cls.__dataclass_fields__.keys():
            raise ParseError("is no job")
        job = cls(**table)
        if (
            not all(_is_name(text) for text in (job.launcher, job.job_id, job.host))
            or not is_count(job.world_size, 1, _MOST_RANKS)
            or not is_count(job.pid)
            or not isinstance(job.settings, dict)
        ):
            raise ParseError("is no job")
        return job

    def same_id(self, other: JobIdentity) -> bool | None:
        """Returns whether the job ids are equal, or None if at least one id is unknown."""
        return self.job_id == other.job_id if self.job_id and other.job_id else None

    def conflict(self, other: JobIdentity) -> str:
        """Returns why `other` is a different job, or "" if both can be the same job."""
        same = self.same_id(other)
        if same is False:
            return "their job ids differ"
        if self.world_size != other.world_size:
            return f"the number of ranks is {self.world_size} there and {other.world_size} here"
        if same is None and self.settings and other.settings and self.settings != other.settings:
            return self._differences(other)
        return ""

    def _differences(self, other: JobIdentity) -> str:
        names = sorted(
            name
            for name in self.settings.keys() | other.settings.keys()
            if self.settings.get(name) != other.settings.get(name)
        )
        shown = [
            f"{name} is {self.settings.get(name)!r} there and {other.settings.get(name)!r} here"
            for name in names[:_NAMED_SETTINGS]
        ]
        more = len(names) - _NAMED_SETTINGS
        return ", ".join(shown) + (f", and {more} more settings differ" if more > 0 else "")

    def describe(self) -> str:
        """Describes the job, as in `torchrun job 4711, configuration 1f3a5b7c, process 99 on node3`."""
        text = json.dumps(self.settings, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return (
            f"{self.launcher} job {self.job_id or 'without an id'}, configuration {digest}, "
            f"process {self.pid} on {self.host}"
        )


def _is_name(text: object) -> bool:
    return isinstance(text, str) and len(text) <= _LONGEST_NAME


def _job_id(env: Mapping[str, str], launcher: str) -> str:
    if env.get("PACELINE_JOB_ID"):
        return env["PACELINE_JOB_ID"]
    if launcher == "slurm":
        # The parts of a heterogeneous job have different ids and one common id.
        if "SLURM_HET_JOB_ID" in env:
            return env["SLURM_HET_JOB_ID"]
        return f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}".strip(".")
    ids = (env.get(name, "") for name in _ID_VARIABLES.get(launcher, ()))
    job_id = next(filter(None, ids), "")
    return "" if launcher == "torchrun" and job_id == _NO_RUN_ID else job_id


def rank_hosts_store() -> bool:
    """Returns True if rank 0's process hosts the rendezvous store, False if torchrun's agent does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


class RankHost(NamedTuple):
    """The name of a rank's host, and the host's address on the network of the rendezvous."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    @classmethod
    def from_list(cls, value: object) -> RankHost | None:
        """Builds the host from a list of name and address; returns None for any other value."""
        if isinstance(value, list) and len(value) == 2 and all(map(_is_name, value)):
            return cls(*value)
        return None


def post_hosts(store: Store, hosts: Mapping[int, RankHost]) -> None:
    """Publishes the hosts of all ranks in the store.

    Consecutive ranks on the same host share one entry, because every rank reads all entries.
    """
    in_order = [hosts[rank] for rank in sorted(hosts)]
    runs = [[*host, len(list(ranks))] for host, ranks in itertools.groupby(in_order)]
    store.set(_HOSTS_KEY, json.dumps(runs))


def _is_run(run: object) -> bool:
    """Returns True if `run` is a list of a host name, an address and a number of consecutive ranks."""
    return (
        isinstance(run, list)
        and RankHost.from_list(run[:2]) is not None
        and len(run) == 3
        and is_count(run[2], 1, _MOST_RANKS)
    )


class RankHosts:
    """The hosts of all ranks, which error messages name.

    Messages do not name hosts if the job has a single host, or if the hosts are unknown (in tests or with
    a single process).
    """

    def __init__(self, hosts: Collection[RankHost] = ()) -> None:
        self._hosts = list(hosts)
        self._several = len(set(self._hosts)) > 1

    @classmethod
    def read(cls, store: Store) -> RankHosts:
        # `get` waits if rank 0 has not published the hosts yet.
        runs = parse_json(store.get(_HOSTS_KEY))
        if not isinstance(runs, list) or not all(map(_is_run, runs)):
            raise ParseError("is no list of hosts")
        if sum(n for *_, n in runs) > _MOST_RANKS:
            raise ParseError("has too many ranks")
        return cls([RankHost(name, address) for name, address, n in runs for _ in range(n)])

    @classmethod
    def posted(cls, store: Store) -> bool:
        return bool(store.check([_HOSTS_KEY]))

    def of(self, rank: int) -> RankHost | None:
        return self._hosts[rank] if self._several and rank < len(self._hosts) else None

    def only(self, ranks: Sequence[int]) -> RankHosts:
        """Returns the hosts of some ranks, which are renumbered in this order."""
        return RankHosts([self._hosts[rank] for rank in ranks]) if self._hosts else self

    def rank_label(self, rank: int) -> str:
        """Returns `rank 3`, or `rank 3 on node7 (10.0.0.7)` if the job has several hosts."""
        host = self.of(rank)
        return f"rank {rank} on {host}" if host else f"rank {rank}"

    def whole_hosts(self, ranks: Collection[int]) -> dict[RankHost, list[int]]:
        """Returns each host of two or more ranks whose ranks are all in `ranks`, with those ranks."""
        if not self._several:
            return {}
        by_host: dict[RankHost, list[int]] = {}
        for rank, host in enumerate(self._hosts):
            by_host.setdefault(host, []).append(rank)
        given = set(ranks)
        return {host: r for host, r in by_host.items() if len(r) > 1 and given.issuperset(r)}

    def describe(self, ranks: Collection[int]) -> str:
        """Names ranks for messages: whole hosts first, then the other ranks.

        For example `host node7 (10.0.0.7) with ranks 8 to 15, rank 3 on node2 (10.0.0.2)`.
        """
        whole = self.whole_hosts(ranks)
        parts = [f"host {host} with {format_ranks(r)}" for host, r in whole.items()]
        if len(parts) > _NAMED_HOSTS:
            parts = [*parts[:_NAMED_HOSTS], f"{len(parts) - _NAMED_HOSTS} more hosts"]
        rest = sorted(set(ranks) - {rank for own in whole.values() for rank in own})
        if rest:
            parts.append(self.rank_label(rest[0]) if len(rest) == 1 else format_ranks(rest))
        return ", ".join(parts)


def format_ranks(ranks: Collection[int]) -> str:
    """Returns `rank 3`, `ranks 1, 5 to 7` or `ranks 0 to 7, 16 to 23, ... (1024 in all)`."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    named = [f"{first} to {last}" if last > first else f"{first}" for first, last in runs]
    if len(named) > _NAMED_RUNS:
        named[_NAMED_RUNS:] = [f"... ({len(numbers)} in all)"]
    return f"ranks {', '.join(named)}"


# One bit for each rank, in the store's signed 64-bit counters.
_BLOCK = 60


class Attendance:
    """Records in the store which ranks have reached a point of the program. Each point has its own key.

    Every rank calls `arrive` once, which adds the rank's bit to a counter that 60 ranks share. The rank
    that completes the last counter knows that all ranks have arrived. So each rank makes only one or two
    requests to the store, and the counters still show which ranks are missing.
    """

    def __init__(self, store: Store, key: str, world_size: int) -> None:
        self._store, self._key, self._size = store, key, world_size
        self._blocks = -(-world_size // _BLOCK)

    def arrive(self, rank: int) -> bool:
        """Records that `rank` has arrived. Returns True on the last rank to arrive."""
        block, bit = divmod(rank, _BLOCK)
        if self._store.add(self._counter(block), 1 << bit) != self._complete(block):
            return False
        return self._blocks == 1 or self._store.add(f"{self._key}/blocks", 1) == self._blocks

    def missing(self) -> list[int]:
        """Returns the ranks that have not arrived."""
        missing = []
        for block in range(self._blocks):
            absent = self._complete(block) & ~self._store.add(self._counter(block), 0)
            missing += [block * _BLOCK + bit for bit in range(_BLOCK) if absent >> bit & 1]
        return missing

    def _counter(self, block: int) -> str:
        return f"{self._key}/ranks/{block}"

    def _complete(self, block: int) -> int:
        """Returns the bit mask in the counter of `block` once all its ranks have joined."""
        return (1 << min(_BLOCK, self._size - block * _BLOCK)) - 1
