"""Which job a rank belongs to (`JobIdentity`), on which host each rank runs (`RankHosts`), and which
ranks have reached a point (`Attendance`).

Two jobs that use one port by mistake must not mix. Every launcher but a bare environment gives its job
an id, and two known ids decide. Where one is unknown, the settings that all ranks share decide. What
may differ between ranks of one job is not compared: restart counts (agents on several nodes do not
count alike), hosts, and a node's own paths and worker counts.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import socket
import zlib
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import Store

from paceline.core.topology import Topology
from paceline.core.untrusted import ParseError, is_count, parse_json

_NAMED_SETTINGS = 3
# Of what is read from the store: far more than any job has.
_MOST_RANKS = 1 << 20
_LONGEST_NAME = 1000
_MOST_HOST_BYTES = 64 << 20
# By launcher: the first of these variables that is set identifies the job.
_ID_VARIABLES = {
    "torchrun": ("TORCHELASTIC_RUN_ID",),
    "openmpi": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    "mpi": ("PMI_JOBID", "PALS_APID"),
}
# What torchrun calls every job that was not given a name with --rdzv-id.
_NO_RUN_ID = "none"
_HOSTS_KEY = "paceline/hosts"
_PROBE_S = 1.0
_PROBED_HOSTS = 8
_NAMED_HOSTS = 4
_NAMED_RUNS = 12


@dataclass(frozen=True)
class JobIdentity:
    """`job_id` is empty where the launcher gives none; `settings` where the program has none."""

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
            # As they arrive at the others: JSON knows no tuples.
            json.loads(json.dumps(dict(settings or {}), default=str)),
            socket.gethostname(),
            os.getpid(),
        )

    def to_table(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_table(cls, table: object) -> JobIdentity:
        """The inverse of `to_table`. Raises ParseError for anything else: others can write to the store
        too."""
        if not isinstance(table, dict) or table.keys() != cls.__dataclass_fields__.keys():
            raise ParseError("is no job")
        found = cls(**table)
        texts = (found.launcher, found.job_id, found.host)
        if (
            not all(isinstance(text, str) and len(text) <= _LONGEST_NAME for text in texts)
            or not is_count(found.world_size, 1, _MOST_RANKS)
            or not is_count(found.pid)
            or not isinstance(found.settings, dict)
        ):
            raise ParseError("is no job")
        return found

    @property
    def digest(self) -> str:
        """Of the settings."""
        text = json.dumps(self.settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def same_id(self, other: JobIdentity) -> bool | None:
        """None where one of the two is unknown."""
        return self.job_id == other.job_id if self.job_id and other.job_id else None

    def conflict(self, other: JobIdentity) -> str:
        """Why `other` is no rank of this job; empty where it may be one."""
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
        """`torchrun job 4711 of 2 ranks, configuration 1f3a5b7c, process 99 on node3`."""
        job_id = f" {self.job_id}" if self.job_id else " without an id"
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        configuration = f", configuration {self.digest}" if self.settings else ""
        return (
            f"{self.launcher} job{job_id} of {ranks}{configuration}, process {self.pid} on "
            f"{self.host}"
        )


def _job_id(env: Mapping[str, str], launcher: str) -> str:
    if env.get("PACELINE_JOB_ID"):
        return env["PACELINE_JOB_ID"]
    if launcher == "slurm":
        # The parts of a heterogeneous job have ids of their own, and one in common.
        if "SLURM_HET_JOB_ID" in env:
            return env["SLURM_HET_JOB_ID"]
        return f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}".strip(".")
    found = (env.get(name, "") for name in _ID_VARIABLES.get(launcher, ()))
    job_id = next(filter(None, found), "")
    return "" if launcher == "torchrun" and job_id == _NO_RUN_ID else job_id


def rank_hosts_store() -> bool:
    """Whether rank 0's process hosts the rendezvous store; under torchrun the agent does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


class RankHost(NamedTuple):
    """A host's own name, and its address towards the rendezvous."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    @classmethod
    def from_list(cls, found: object) -> RankHost | None:
        """None for anything but two short texts."""
        if not isinstance(found, list) or len(found) != 2:
            return None
        if not all(isinstance(text, str) and len(text) <= _LONGEST_NAME for text in found):
            return None
        return cls(*found)


def post_hosts(store: Store, hosts: Mapping[int, RankHost]) -> None:
    """On rank 0, in order of rank and compressed: every rank reads it."""
    in_order = [hosts[rank] for rank in sorted(hosts)]
    runs = [[*host, len(list(ranks))] for host, ranks in itertools.groupby(in_order)]
    store.set(_HOSTS_KEY, base64.b64encode(zlib.compress(json.dumps(runs).encode())).decode())


def _is_run(run: object) -> bool:
    """Returns True for a host's name, its address and its number of ranks."""
    return (
        isinstance(run, list)
        and len(run) == 3
        and RankHost.from_list(run[:2]) is not None
        and is_count(run[2], 1, _MOST_RANKS)
    )


class RankHosts:
    """The hosts of all ranks, as messages name them. A job on a single host, or one whose hosts are
    unknown (a test, a single process), names ranks alone."""

    def __init__(self, hosts: Collection[RankHost] = ()) -> None:
        self._hosts = list(hosts)
        self._distinct = list(dict.fromkeys(self._hosts))

    @classmethod
    def read(cls, store: Store) -> RankHosts:
        # Ranks that have their place may come before rank 0 has posted it: `get` waits.
        try:
            unpacked = zlib.decompressobj().decompress(
                base64.b64decode(store.get(_HOSTS_KEY)), _MOST_HOST_BYTES
            )
        except (ValueError, zlib.error):
            raise ParseError("is no list of hosts") from None
        runs = parse_json(unpacked)
        if not isinstance(runs, list) or not all(map(_is_run, runs)):
            raise ParseError("is no list of hosts")
        if sum(n for *_, n in runs) > _MOST_RANKS:
            raise ParseError("has too many ranks")
        return cls([RankHost(name, address) for name, address, n in runs for _ in range(n)])

    @classmethod
    def posted(cls, store: Store) -> bool:
        return bool(store.check([_HOSTS_KEY]))

    @property
    def several(self) -> bool:
        return len(self._distinct) > 1

    def of(self, rank: int) -> RankHost | None:
        return self._hosts[rank] if self.several and rank < len(self._hosts) else None

    def leader(self, rank: int) -> int:
        """The lowest rank on the host of `rank`; the rank itself where hosts are unknown."""
        return self._hosts.index(self._hosts[rank]) if rank < len(self._hosts) else rank

    def count(self, rank: int) -> int:
        """How many ranks the host of `rank` has."""
        return self._hosts.count(self._hosts[rank]) if rank < len(self._hosts) else 1

    def rank_label(self, rank: int) -> str:
        """`rank 3`, or `rank 3 on node7 (10.0.0.7)`."""
        host = self.of(rank)
        return f"rank {rank} on {host}" if host else f"rank {rank}"

    def whole_hosts(self, ranks: Collection[int]) -> dict[RankHost, list[int]]:
        """Hosts with several ranks, of which all are among `ranks`, with these."""
        if not self.several:
            return {}
        theirs: dict[RankHost, list[int]] = {}
        for rank, host in enumerate(self._hosts):
            theirs.setdefault(host, []).append(rank)
        among = set(ranks)
        return {host: r for host, r in theirs.items() if len(r) > 1 and among.issuperset(r)}

    def describe(self, ranks: Collection[int]) -> str:
        """For messages: whole hosts as such, then the other ranks; both cut short where they are many.
        `host node7 (10.0.0.7) with ranks 8 to 15 and rank 3 on node2 (10.0.0.2)`."""
        whole = self.whole_hosts(ranks)
        parts = [f"host {host} with {format_ranks(r)}" for host, r in whole.items()]
        if len(parts) > _NAMED_HOSTS:
            count = sum(len(theirs) for theirs in whole.values())
            names = ", ".join(host.name for host in list(whole)[:_NAMED_HOSTS])
            parts = [f"{len(whole)} hosts with all of their {count} ranks ({names}, ...)"]
        others = sorted(set(ranks) - {rank for theirs in whole.values() for rank in theirs})
        if len(others) == 1:
            parts.append(self.rank_label(others[0]))
        elif others:
            parts.append(format_ranks(others))
        return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)

    def gone_text(self, address: str) -> str:
        """Who is gone when the connection to this address broke; empty where it is not one of several
        hosts of the job."""
        for host in self._distinct if self.several else ():
            if host.address == address:
                ranks = [rank for rank, own in enumerate(self._hosts) if own == host]
                if len(ranks) == 1:
                    return f"{self.rank_label(ranks[0])} is gone"
                return f"host {host} or one of its {format_ranks(ranks)} is gone"
        return ""

    def others_that_answer(self, rank: int, port: int) -> list[RankHost] | None:
        """Hosts other than this rank's and rank 0's that this one still reaches; None where there is no
        such host. A port that refuses is an answer too; one that a firewall drops is not."""
        known = {self.of(rank), self.of(0)}
        others = [host for host in self._distinct if host not in known][:_PROBED_HOSTS]
        if not others or not self.several:
            return None
        with ThreadPoolExecutor(len(others)) as pool:
            answers = list(pool.map(lambda host: _answers(host.address, port), others))
        return [host for host, answer in zip(others, answers, strict=True) if answer]


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=_PROBE_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def format_ranks(ranks: Collection[int]) -> str:
    """`rank 3`, `ranks 4 to 7`, `ranks 1, 5 and 9`, `ranks 0 to 7, 16 to 23, ... (1024 in all)`."""
    numbers = sorted(ranks)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    named: list[str] = []
    for first, last in runs:
        long = last - first > 1
        named += [f"{first} to {last}"] if long else map(str, range(first, last + 1))
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(named) > _NAMED_RUNS:
        return f"ranks {', '.join(named[:_NAMED_RUNS])}, ... ({len(numbers)} in all)"
    return f"ranks {' and '.join(filter(None, (', '.join(named[:-1]), named[-1])))}"


# A bit for each rank, in the store's signed 64-bit counters.
_BLOCK = 60


class Attendance:
    """One point, under a key that is used for it alone. Every rank calls `arrive` once.

    Each rank adds one bit to a counter that it shares with 59 others, and the rank that completes the
    last counter knows that all are there. So a point costs a rank one request, nobody reads rank by rank,
    and the counters still name every rank that is missing.
    """

    def __init__(self, store: Store, key: str, world_size: int) -> None:
        self._store, self._key, self._size = store, key, world_size
        self._blocks = -(-world_size // _BLOCK)

    def arrive(self, rank: int) -> bool:
        """True on the rank that completes the attendance."""
        block, bit = divmod(rank, _BLOCK)
        if self._store.add(self._counter(block), 1 << bit) != self._complete(block):
            return False
        return self._blocks == 1 or self._store.add(f"{self._key}/blocks", 1) == self._blocks

    def missing(self) -> list[int]:
        """Ranks that have not arrived."""
        missing = []
        for block in range(self._blocks):
            absent = self._complete(block) & ~self._store.add(self._counter(block), 0)
            missing += [block * _BLOCK + bit for bit in range(_BLOCK) if absent >> bit & 1]
        return missing

    def _counter(self, block: int) -> str:
        return f"{self._key}/ranks/{block}"

    def _complete(self, block: int) -> int:
        """The counter's value once all of its ranks have arrived."""
        return (1 << min(_BLOCK, self._size - block * _BLOCK)) - 1
