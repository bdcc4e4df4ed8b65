"""`VirtualStatistics`: the running statistics of batch norm of many ranks in one process."""

from __future__ import annotations

from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.train.batch_norm import BatchNormState, pool


class VirtualStatistics(BatchNormState):
    """Has a row for each virtual rank in `kept`. The layers use `flat`, which `load` fills for one rank
    and `store` saves."""

    def __init__(self, model: nn.Module, ranks: int) -> None:
        super().__init__(model)
        self.keep(
            self.flat.expand(ranks, *self.flat.shape).clone(),
            self.tracked.expand(ranks, -1).clone(),
        )

    @property
    def saved_tracked(self) -> Tensor:
        return self.kept_tracked[0]

    def load(self, rank: int) -> None:
        """Gives the layers the statistics of a virtual rank."""
        self.flat.copy_(self.kept[rank])
        self.tracked.copy_(self.kept_tracked[rank])

    def store(self, rank: int) -> None:
        """Makes the statistics of the layers those of a virtual rank."""
        self.kept[rank].copy_(self.flat)
        self.kept_tracked[rank].copy_(self.tracked)

    def average(self, group: Group) -> Tensor:
        return pool(self.kept)

    def gather(self, kept: Tensor, group: Group, *, average: bool = False) -> Tensor:
        if average:
            kept.copy_(pool(kept))
        return (kept[:1] if average else kept).detach().cpu().clone()

    def own_rows(self, rows: Tensor, group: Group) -> Tensor:
        return rows if len(rows) == len(self.kept) else pool(rows)
