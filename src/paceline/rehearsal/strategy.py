"""`Rehearsal`: one process computes all ranks of a cluster, and predicts the times there.

`VirtualStatistics` keeps the running batch-norm statistics of each of these ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.events import NoteEvent, ShownField
from paceline.core.units import format_duration
from paceline.data import BatchPlan
from paceline.plan.plan_file import ClusterFacts
from paceline.planner.layers import Network
from paceline.rehearsal.cluster_clock import ClusterClock, RehearsedCluster, cluster_clock
from paceline.rehearsal.exchange import RehearsedExchange, cluster_groups
from paceline.rehearsal.settings import RehearsalSettings
from paceline.train.batch_norm import BatchNormState, pool
from paceline.train.batch_sizes import eval_batch
from paceline.train.exchange_plan import ExchangeParts
from paceline.train.inputs import RunInputs
from paceline.train.machine import explain_out_of_memory
from paceline.train.micro_step import MicroStep
from paceline.train.step import StepOutcome
from paceline.train.step_parts import StepParts
from paceline.train.strategy import MicroBatch, Synchronous, micro_batches_of
from paceline.train.training import Training

# Algorithms with which a rehearsed exchange needs to keep few partial sums.
_FRUGAL = ("hierarchical", "torus2d", "tree")


class VirtualStatistics(BatchNormState):
    """The running batch-norm statistics of all simulated ranks, one row of `kept` for each.

    The model's layers use the statistics in `flat`. `load` copies a rank's row to `flat`, and
    `store` copies `flat` back to that row.
    """

    def __init__(self, model: nn.Module, ranks: int) -> None:
        super().__init__(model)
        self.keep(
            self.flat.expand(ranks, *self.flat.shape).clone(),
            self.tracked.expand(ranks, -1).clone(),
        )

    def load(self, rank: int) -> None:
        """Makes the layers use the statistics of a virtual rank."""
        self.flat.copy_(self.kept[rank])
        self.tracked.copy_(self.kept_tracked[rank])

    def store(self, rank: int) -> None:
        """Saves the statistics of the layers as the statistics of a virtual rank."""
        self.kept[rank].copy_(self.flat)
        self.kept_tracked[rank].copy_(self.tracked)

    def average(self, group: Group) -> Tensor:
        return pool(self.kept, self.kept_tracked)

    def gather(self, kept: Tensor, group: Group, *, average: bool = False) -> Tensor:
        if average:
            kept.copy_(pool(kept, self.kept_tracked))
        return (kept[:1] if average else kept).detach().cpu().clone()

    def gather_tracked(self, group: Group, *, average: bool = False) -> Tensor:
        if average:
            self.kept_tracked.copy_(self.kept_tracked.amax(0))
        return (self.kept_tracked[:1] if average else self.kept_tracked).detach().cpu().clone()

    def own_rows(self, rows: Tensor, tracked: Tensor, group: Group) -> Tensor:
        return rows if len(rows) == len(self.kept) else pool(rows, tracked)

    def own_tracked(self, tracked: Tensor, group: Group) -> Tensor:
        return tracked if len(tracked) == len(self.kept) else tracked.amax(0)


class Rehearsal(Synchronous):
    """Trains as all ranks of a cluster together would, in one process.

    Computes the micro-batches of each virtual rank with its own batch-norm statistics, and adds up
    the gradients of all virtual ranks as their all-reduce would. The predicted clock advances with
    every step and evaluation.
    """

    name = "rehearsal"
    fixed_ranks = "the ranks are virtual"
    equal_parts = "the predicted times are of ranks with equal parts"
    one_batch = "a rehearsal has one, the cluster's run only with --set optim.batch_schedule=''"
    shown = (
        ShownField("predicted_s", "cluster's time (predicted)", "duration", "cluster time",
                   "predicted minutes"),
        ShownField("predicted_s_to_target", "cluster's time to target", "duration"),
        ShownField("images_per_s", "cluster's images/s", "rate"),
        ShownField("gpu_hours", "cluster's GPU hours"),
        ShownField("cost", "cluster's cost", column="cost"),
        ShownField("energy_kwh", "cluster's energy (kWh)", column="kWh"),
    )  # fmt: skip

    def __init__(self, config: RunConfig, group: Group) -> None:
        super().__init__(config, group)
        self.settings = config.run.of(self.name, RehearsalSettings)
        self._there = RehearsedCluster(self.settings)
        self.clock: ClusterClock | None = None
        self._predicted_s = 0.0
        self._to_target: float | None = None

    @classmethod
    def ranks(cls, config: RunConfig, processes: int) -> int:
        return config.run.of(cls.name, RehearsalSettings).ranks

    def load(self, saved: Mapping[str, Any]) -> None:
        self._predicted_s = saved.get("predicted_s", 0.0)
        self._to_target = saved.get("predicted_s_to_target")

    def prepare(self, model: nn.Module, inputs: RunInputs) -> None:
        # With `eval_flip`, an evaluation computes the mirror image of each image, too.
        self._validation = len(inputs.validation) * (2 if self.config.data.eval_flip else 1)
        classes = self.config.model.num_classes or len(inputs.source.classes)
        self._layers = self._count_layers(model, classes)

    def _count_layers(self, model: nn.Module, classes: int) -> Network | None:
        """Returns the layers from which the step time is predicted, or None if they are not needed."""
        config = self.config
        name, pixels, channels = config.model.name, config.data.image_size, config.data.channels

        def count() -> Network:
            # Imported only if needed, because torch's FLOP counter imports Triton.
            from paceline.rehearsal.layer_count import count_trained

            return count_trained(model, name, pixels, channels)

        stem = config.model.stem_for(pixels)
        net = self._there.network(name, pixels, classes, stem, count, channels=channels)
        again = getattr(config.run.owned.get("accel"), "recompute_norms", False)
        return net.recomputing_norms() if net is not None and again else net

    @classmethod
    def cluster(cls, config: RunConfig, processes: int, nodes: int) -> ClusterFacts:
        settings = config.run.of(cls.name, RehearsalSettings)
        return ClusterFacts(settings.ranks, settings.nodes)

    def batch_norm(self, model: nn.Module) -> VirtualStatistics:
        self._statistics = VirtualStatistics(model, self.settings.ranks)
        return self._statistics

    def create_exchange(
        self, planned: ExchangeParts, *, accumulate: bool, graphs: bool, squares: bool
    ) -> RehearsedExchange:
        group, settings = self.group, self.settings
        groups = cluster_groups(settings.nodes, settings.gpus_per_node, planned.settings.group_size)
        remedy = "use fewer ranks"
        if planned.settings.algorithm not in _FRUGAL:
            remedy += f", or comm.algorithm={', '.join(_FRUGAL)}, which keep fewer"

        def create() -> RehearsedExchange:
            where = f"with the partial sums of {settings.ranks:,} virtual ranks on {group.device}"
            with explain_out_of_memory(where, remedy):
                return RehearsedExchange(
                    planned.trained.items(), group, planned.plan, groups, accumulate=accumulate,
                    squares=squares,
                )  # fmt: skip

        self._virtual = group.agree_on("exchange", create)
        return self._virtual

    def divide(self, plan: BatchPlan, compute: Callable[[], None]) -> BatchPlan:
        self._plan = plan
        return plan

    @property
    def computed_ranks(self) -> Sequence[int]:
        return self._virtual.order

    def attach(self, parts: StepParts, micro: MicroStep) -> None:
        super().attach(parts, micro)
        self._micro = micro
        config, batch, half = self.config, self._plan.micro_batch, parts.policy.is_half
        # The number formats of this process: with `auto` on a CPU, these are fp32, even if the GPUs
        # of the cluster would use half precision.
        tensors = {
            name: (p.numel(), p.dtype != torch.float32)
            for name, p in parts.exchange.parameters.items()
        }
        there, net = self._there, self._layers
        fused = getattr(config.run.owned.get("accel"), "allows_fused_norms", True)
        there.check_batch(net, batch=batch, half=half, fused=fused and config.run.channels_last)
        work = there.workload(config.model.name, config.data.image_size, net, tensors)
        if work is not None:
            self.clock = cluster_clock(
                self.settings, parts.exchange.plan, work.with_tensors(tensors), batch=batch,
                accumulation=self._plan.accumulation, validation=self._validation,
                eval_batch=eval_batch(batch),
            )  # fmt: skip

    @classmethod
    def outline(cls, config: RunConfig, ranks: int) -> dict[str, str]:
        nodes = config.run.of(cls.name, RehearsalSettings).nodes
        return {
            "rehearsal": f"of {cls.ranks(config, 1):,} ranks on {nodes:,} node(s), in one process, one "
            "after the other"
        }

    def describe(self) -> dict[str, str]:
        unknown = "none: give --gpu, --profile or --cluster for the cluster's time"
        clock = unknown if self.clock is None else self.clock.describe()
        return {**super().describe(), "clock": clock}

    def start(self, training: Training) -> None:
        """Starts to add up predicted times, from 0 or from the predicted time in the checkpoint.

        If the checkpoint has no predicted time, its steps are assumed to take as long as later
        ones.
        """
        self._progress = progress = training.progress
        if progress.time_to_target_s is None:
            self._to_target = None
        if self.clock is None:
            self._predicted_s = 0.0
            return
        if self._predicted_s:
            return
        self._predicted_s = self.clock.startup_s + progress.step * self.clock.step_s
        if progress.step:
            training.emit(
                NoteEvent(
                    f"the checkpoint has no predicted time: its {progress.step:,} steps count as those "
                    "that follow, its evaluations do not count"
                )
            )

    def micro_batches(self, step: int, plan: BatchPlan) -> Iterator[MicroBatch]:
        for rank in self._virtual.order:
            self._statistics.load(rank)
            self._micro.loss.zero_()
            yield from micro_batches_of(plan, step, rank)
            self._virtual.end_rank(self._micro.loss)
            self._statistics.store(rank)

    def record(self, outcome: StepOutcome) -> Mapping[str, Any]:
        return self._advanced(self.clock.step_s if self.clock else 0.0)

    def record_evaluation(self, *, reached_target: bool) -> Mapping[str, Any]:
        fields = self._advanced(self.clock.eval_s if self.clock else 0.0)
        if reached_target and self._to_target is None:
            self._to_target = self._predicted_s
        return fields

    def _advanced(self, seconds: float) -> dict[str, Any]:
        """Advances the predicted time by `seconds`, and returns it as a field for metrics.jsonl.

        Returns no field if there is no clock.
        """
        self._predicted_s += seconds
        return {"predicted_s": self._predicted_s} if self.clock else {}

    def remark(self) -> str:
        return f"on the cluster after {format_duration(self._predicted_s)}" if self.clock else ""

    def state(self) -> dict[str, Any]:
        return {"predicted_s": self._predicted_s, "predicted_s_to_target": self._to_target}

    def summary(self) -> dict[str, Any]:
        settings = self.settings
        fields: dict[str, Any] = {
            "nodes": settings.nodes, "gpus_per_node": settings.gpus_per_node, "ranks": settings.ranks,
        }  # fmt: skip
        if self.clock is not None:
            fields |= asdict(self.clock) | self.clock.totals(self._predicted_s)
            reached = self._progress.time_to_target_s is not None
            fields["predicted_s_to_target"] = (
                (self._to_target or self._predicted_s) if reached else None
            )
        return {self.name: fields}
