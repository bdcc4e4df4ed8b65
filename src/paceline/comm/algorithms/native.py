"""`native`: the backend's own all-reduce.

In: a buffer. Out: its sum. What NCCL does well on its own, and the peer that the others must beat.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from paceline.comm.algorithms.all_reduce import check_buffer
from paceline.comm.process_groups import ProcessGroups


class Native:
    name = "native"

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups

    def all_reduce(self, buffer: Tensor) -> None:
        check_buffer(buffer)
        if self._groups.world is not None and buffer.numel():
            dist.all_reduce(buffer, group=self._groups.world)
