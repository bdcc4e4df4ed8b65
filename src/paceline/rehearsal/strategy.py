"""The strategy of a rehearsal: one process computes all virtual ranks, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from paceline.comm.exchange import GradientExchange
from paceline.comm.rehearsal import RehearsedExchange, cluster_groups
from paceline.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.data import BatchPlan
from paceline.plan.fusion_plan import EIGHT_BIT, FusionPlan
from paceline.plan.plan_file import ClusterFacts
from paceline.train.batch_norm import BatchNormState
from paceline.train.exchange_plan import ExchangeParts
from paceline.train.machine import explain_out_of_memory
from paceline.train.micro_step import MicroStep
from paceline.train.step_parts import StepParts
from paceline.train.strategy import MicroBatch, Synchronous, micro_batches_of


class Rehearsal(Synchronous):
    """Each virtual rank has its own batch-norm statistics; the exchange adds what each has computed."""

    name = "rehearsal"
    one_batch = "a rehearsal has one, the cluster's run only with --set optim.batch_schedule=''"

    @classmethod
    def ranks(cls, config: RunConfig, processes: int) -> int:
        return config.rehearse.ranks

    @classmethod
    def check_plan(cls, config: RunConfig, plan: FusionPlan) -> None:
        for bucket in plan.buckets:
            if bucket.wire in EIGHT_BIT:
                raise ConfigError(
                    "comm.plan", config.comm.plan or None,
                    f"has buckets in {bucket.wire}, which cannot be rehearsed",
                    "make a plan without 8-bit formats, or leave comm.plan out",
                )  # fmt: skip

    def cluster(self, nodes: int) -> ClusterFacts:
        return ClusterFacts(self.config.rehearse.ranks, self.config.rehearse.nodes)

    def batch_norm(self, model: nn.Module) -> BatchNormState:
        return BatchNormState(model, self.config.rehearse.ranks)

    def create_exchange(
        self, planned: ExchangeParts, *, accumulate: bool, graphs: bool, squares: bool
    ) -> GradientExchange:
        cluster, comm = self.config.rehearse, self.config.comm
        groups = cluster_groups(cluster.nodes, cluster.gpus_per_node, comm.group_size)
        where = f"with the partial sums of {cluster.ranks:,} virtual ranks on {self.group.device}"
        frugal = ("hierarchical", "torus2d", "tree")
        remedy = "use fewer ranks"
        if comm.algorithm not in frugal:
            remedy += f", or comm.algorithm={', '.join(frugal)}, which keep fewer"

        def create() -> RehearsedExchange:
            with explain_out_of_memory(where, remedy):
                return RehearsedExchange(
                    planned.trained.items(), self.group, planned.plan, groups,
                    accumulate=accumulate, squares=squares,
                )  # fmt: skip

        self._rehearsed = self.group.agree_on("exchange", create)
        return self._rehearsed

    @property
    def computed_ranks(self) -> Sequence[int]:
        return self._rehearsed.order

    def attach(self, parts: StepParts, micro: MicroStep) -> None:
        super().attach(parts, micro)
        self._loss, self._statistics = micro.loss, parts.batch_norm

    def micro_batches(self, step: int, plan: BatchPlan) -> Iterator[MicroBatch]:
        for rank in self._rehearsed.order:
            self._statistics.load(rank)
            self._loss.zero_()
            yield from micro_batches_of(plan, step, rank)
            self._rehearsed.end_rank(self._loss)
            self._statistics.store(rank)
