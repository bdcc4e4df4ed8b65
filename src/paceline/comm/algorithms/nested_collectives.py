"""`hierarchical` and `torus2d` from the backend's own collectives in parts of the cluster.

In: a buffer, and `ProcessGroups` with groups for rows, columns and masters. Out: its sum. This is the
form for NCCL, which is fast inside a node and knows its links; over Gloo the explicit forms are better.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from paceline.comm.algorithms.all_reduce import check_buffer
from paceline.comm.algorithms.single_names import all_gather_single, reduce_scatter_single
from paceline.comm.algorithms.staging import Staging
from paceline.comm.process_groups import ProcessGroups
from paceline.core.errors import CommError


class NestedHierarchical:
    """Reduce in the row, all-reduce among masters, broadcast in the row."""

    name = "hierarchical"

    def __init__(self, groups: ProcessGroups, staging: Staging | None = None) -> None:
        _need_parts(self.name, groups)
        self._groups = groups

    def all_reduce(self, buffer: Tensor) -> None:
        check_buffer(buffer)
        row, masters = self._groups.row, self._groups.masters
        if row is None or buffer.numel() == 0:
            return
        master = self._groups.layout.row_of(self._groups.rank)[0]
        dist.reduce(buffer, dst=master, group=row)
        if masters is not None:
            dist.all_reduce(buffer, group=masters)
        dist.broadcast(buffer, src=master, group=row)


class NestedTorus2d:
    """Reduce-scatter in the row, all-reduce in the column, all-gather in the row; equal rows only."""

    name = "torus2d"

    def __init__(self, groups: ProcessGroups, staging: Staging | None = None) -> None:
        _need_parts(self.name, groups)
        if not groups.layout.is_uniform:
            raise CommError(
                "groups of unequal size have no reduce-scatter in equal chunks",
                "use the explicit Torus2d",
            )
        self._groups = groups
        self._staging = staging or Staging()
        self._row_ranks = groups.layout.row_of(groups.rank) if groups.has_parts else (groups.rank,)

    def all_reduce(self, buffer: Tensor) -> None:
        check_buffer(buffer)
        row = self._groups.row
        if row is None or buffer.numel() == 0:
            return
        width = len(self._row_ranks)
        at = self._row_ranks.index(self._groups.rank)
        length = -(-buffer.numel() // width)
        whole = buffer
        if length * width != buffer.numel():
            whole = self._staging.take("padded", length * width, buffer.dtype, buffer.device)
            whole[: buffer.numel()].copy_(buffer)
            whole[buffer.numel() :].zero_()
        own = self._staging.take("own", length, buffer.dtype, buffer.device)
        reduce_scatter_single(own, whole, row)
        dist.all_reduce(own, group=self._groups.columns[at])
        all_gather_single(whole, own, row)
        if whole is not buffer:
            buffer.copy_(whole[: buffer.numel()])


def _need_parts(name: str, groups: ProcessGroups) -> None:
    if groups.backend != "none" and not groups.has_parts:
        raise CommError(
            f"{name} by the backend's own collectives needs groups for rows and columns",
            "make ProcessGroups with subgroups=True",
        )
