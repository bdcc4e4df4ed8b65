"""`central`: a synchronous parameter server, sharded over s servers (see `Owners`).

In: a buffer. Out: its sum. Every rank sends each server its shard and has the sum back. It is the
baseline that the field left behind: a server's link carries p times its shard.
"""

from __future__ import annotations

from torch import Tensor

from paceline.comm.algorithms.explicit import Explicit
from paceline.comm.algorithms.lane import Lane
from paceline.comm.algorithms.owners import Owners
from paceline.comm.algorithms.segments import Rounds
from paceline.comm.algorithms.staging import Staging
from paceline.comm.process_groups import ProcessGroups
from paceline.core.errors import ConfigError


class Central(Explicit):
    name = "central"
    least_segment_bytes = 4 * 1024 * 1024
    segment_bytes = 16 * 1024 * 1024

    def __init__(
        self,
        groups: ProcessGroups,
        staging: Staging | None = None,
        *,
        servers: int | None = None,
        batched: bool | None = None,
    ) -> None:
        """`servers`: how many ranks serve; None means one in each group."""
        super().__init__(groups, staging, batched=batched)
        order = groups.layout.order
        if servers is None:
            self.servers = groups.layout.masters
        elif 1 <= servers <= len(order):
            # Spread evenly, so that the servers share neither a node nor its link while others rest.
            self.servers = tuple(order[len(order) * at // servers] for at in range(servers))
        else:
            raise ConfigError("servers", servers, f"must be 1 to {len(order)}, the number of ranks")

    def rounds(self, segment: Tensor, lane: Lane) -> Rounds:
        owners = Owners(lane, segment, self._layout.order, self.servers, self._rank)
        return _there_and_back(owners)


def _there_and_back(owners: Owners) -> Rounds:
    yield from owners.reduce()
    yield from owners.gather()
