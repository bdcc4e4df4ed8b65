"""`RankHosts`: which host each rank runs on, for errors that name one, and whether a host answers.

In: what ranks said of themselves at the rendezvous. Out: names for ranks and hosts as a person looks for
them. A job on a single host does not mention it.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

_KEY = "paceline/hosts"
_PROBE_S = 1.0
_PROBED_HOSTS = 8


class RankHost(NamedTuple):
    """A host's own name, and its address towards the rendezvous."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


def post_hosts(store: Store, hosts: Mapping[int, RankHost]) -> None:
    """On rank 0, before any rank reads."""
    store.set(_KEY, json.dumps([list(hosts[rank]) for rank in sorted(hosts)]))


class RankHosts:
    """Of all ranks of a job; without hosts (a test, a single process) it names ranks alone."""

    def __init__(self, hosts: Collection[RankHost] = ()) -> None:
        self._hosts = list(hosts)
        self._distinct = list(dict.fromkeys(self._hosts))

    @classmethod
    def read(cls, store: Store) -> RankHosts:
        return cls([RankHost(*host) for host in json.loads(store.get(_KEY))])

    @property
    def several(self) -> bool:
        return len(self._distinct) > 1

    def of(self, rank: int) -> RankHost | None:
        return self._hosts[rank] if self.several and rank < len(self._hosts) else None

    def rank_label(self, rank: int) -> str:
        """`rank 3`, or `rank 3 on node7 (10.0.0.7)`."""
        host = self.of(rank)
        return f"rank {rank} on {host}" if host else f"rank {rank}"

    def whole_hosts(self, ranks: Collection[int]) -> dict[RankHost, list[int]]:
        """Hosts with several ranks, of which all are among `ranks`, with these."""
        found: dict[RankHost, list[int]] = {}
        for host in self._distinct if self.several else ():
            theirs = [rank for rank, own in enumerate(self._hosts) if own == host]
            if len(theirs) > 1 and set(theirs) <= set(ranks):
                found[host] = theirs
        return found

    def gone_text(self, address: str) -> str:
        """That whoever is at this address is gone; empty where no host of several has it."""
        for host in self._distinct if self.several else ():
            if host.address == address:
                ranks = [rank for rank, own in enumerate(self._hosts) if own == host]
                if len(ranks) == 1:
                    return f"{self.rank_label(ranks[0])} is gone"
                return f"host {host} or one of its {ranks_text(ranks)} is gone"
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


def ranks_text(ranks: Collection[int]) -> str:
    """`rank 3`, `ranks 4 to 7` or `ranks 1, 5 and 9`."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]} to {numbers[-1]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
