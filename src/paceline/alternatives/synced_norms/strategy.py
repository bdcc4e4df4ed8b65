"""Implements the strategy `synced_norms`: batch norms share statistics among groups of ranks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from paceline.alternatives.synced_norms.settings import SyncedNormsSettings
from paceline.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.core.units import plural
from paceline.data import BatchPlan
from paceline.models.synced_norm import NormGroup, find_norms, synchronize_norms
from paceline.train.inputs import RunInputs
from paceline.train.strategy import Pending, Synchronous


def _settings(config: RunConfig) -> SyncedNormsSettings:
    return config.run.of(SyncedNorms.name, SyncedNormsSettings)


class SyncedNorms(Synchronous):
    """Synchronous training in which a group of ranks computes batch-norm statistics together."""

    name = "synced_norms"
    eager = True
    fixed_ranks = "batch norms share statistics among fixed groups of ranks"
    equal_parts = "the ranks of a group normalize each micro-batch together"
    _norms: NormGroup

    @classmethod
    def check(cls, config: RunConfig, ranks: int) -> None:
        size = _settings(config).ranks
        if ranks % size:
            raise ConfigError(
                "run.synced_norms.ranks", size, f"does not divide {plural(ranks, 'rank')}",
                "use a divisor of the number of ranks, or run.strategy = 'synchronous'",
            )  # fmt: skip

    @classmethod
    def check_model(cls, model: nn.Module) -> None:
        problem = "" if find_norms(model) else "this model has no batch norm"
        for norm in find_norms(model):
            if norm.momentum is None:
                problem = "batch norms with momentum None cannot be synchronized"
            elif isinstance(norm, nn.SyncBatchNorm):
                problem = "this model already contains torch's SyncBatchNorm"
        if problem:
            raise ConfigError("run.strategy", cls.name, problem, "use 'synchronous'")

    def prepare(self, model: nn.Module, inputs: RunInputs) -> None:
        size = _settings(self.config).ranks
        shared = self.group.create_subgroup(size, self.config.comm.timeout_s)
        self._norms = NormGroup(size, shared)
        synchronize_norms(model, self._norms)

    def describe(self) -> dict[str, str]:
        size = self._norms.size
        text = f"statistics over {self.group.world_size // size} group(s) of {size} ranks"
        return {"synced norms": text}

    def begin(self, step: int, plan: BatchPlan) -> None:
        """Computes statistics per rank in steps in which ranks have different numbers of micro-batches.

        The last step can be such a step. With common statistics, some ranks would wait there forever.
        """
        first, last = plan.step_range(step)
        full = last - first == plan.batch_at(step)
        counts = {len(plan.micro_batches(step, rank)) for rank in range(self.group.world_size)}
        self._norms.active = full or len(counts) == 1
        self.stops_within_step = not self._norms.active

    def finish(self, rate: float, hyperparameters: Mapping[str, float] | None) -> Pending:
        self._norms.active = False
        return super().finish(rate, hyperparameters)
