"""`PlanChoice`: the fusion plan that the settings ask for.

In: the settings, with the files that they name, the trained tensors and the cluster. Out: a `FusionPlan`,
once the order of the gradients is known, where it matters. Without torch; every rank comes to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.comm.algorithms.names import check_name
from paceline.comm.messages import item_bytes
from paceline.comm.settings import WIRES, CommSettings
from paceline.comm.size_table import SizeTable
from paceline.core.errors import ConfigError, nearest
from paceline.core.flat_layout import TensorSpec
from paceline.plan.fusion_plan import FusionBuffer, FusionPlan
from paceline.plan.plan_file import ClusterFacts, ModelFacts, PlanFile

# What goes beside the bulk of a buffer is some hundred numbers long: the signals, norms, biases.
_BESIDE_BYTES = 4096


@dataclass(frozen=True)
class PlanChoice:
    """`fixed` is the plan where it does not depend on the order."""

    settings: CommSettings
    tensors: tuple[TensorSpec, ...]
    table: SizeTable
    fixed: FusionPlan | None

    @classmethod
    def read(
        cls, settings: CommSettings, tensors: Sequence[TensorSpec], cluster: ClusterFacts
    ) -> PlanChoice:
        """`tensors` as the model declares them."""
        table, fixed = SizeTable.single("native"), None
        if settings.plan:
            fixed = _read_plan(settings.plan, tensors, cluster)
        elif settings.algorithm == "hybrid" and settings.sizes:
            table = _read_table(Path(settings.sizes), cluster)
        elif settings.algorithm == "hybrid":
            table = SizeTable.two_way(1024 * (settings.eta_kib or 0))
        elif settings.algorithm != "auto":
            table = SizeTable.single(settings.algorithm)
        elif cluster.ranks == 1:
            # Nothing travels; one buffer has the least to do.
            fixed = FusionPlan.single([spec.name for spec in reversed(tensors)])
        choice = cls(settings, tuple(tensors), table, fixed)
        if fixed is None and (not tensors or choice._fits_one_buffer):
            # One buffer: nothing leaves before its last gradient, in whichever order they come.
            fixed = choice.plan([spec.name for spec in reversed(tensors)])
        return replace(choice, fixed=fixed)

    def plan(self, order: Sequence[str]) -> FusionPlan:
        """Buffers in this order of the gradients."""
        if self.fixed is not None:
            return self.fixed
        by_name = {spec.name: spec for spec in self.tensors}
        sizes = [(name, self._bytes(by_name[name])) for name in order]
        pools = FusionPlan.by_threshold(sizes, self._threshold, wire=self.settings.wire)
        return FusionPlan(tuple(self._with_algorithms(pool, by_name) for pool in pools.buffers))

    def _with_algorithms(self, pool: FusionBuffer, by_name: dict[str, TensorSpec]) -> FusionBuffer:
        bulk = self.table.choose(self._bulk_bytes(pool, by_name))
        small = self.table.choose(_BESIDE_BYTES)
        return replace(pool, algorithm=bulk, beside=small if small != bulk else "")

    @property
    def _threshold(self) -> int:
        return int(self.settings.fusion_mib * 2**20)

    @property
    def _fits_one_buffer(self) -> bool:
        return 0 < self._threshold >= sum(self._bytes(spec) for spec in self.tensors)

    def _bytes(self, spec: TensorSpec) -> int:
        """On the wire."""
        return spec.length * item_bytes(spec.dtype, self.settings.wire)

    def _bulk_bytes(self, pool: FusionBuffer, by_name: dict[str, TensorSpec]) -> int:
        """Tensors of one format travel as one message; the largest counts."""
        totals: dict[str, int] = {}
        for name in pool.tensors:
            spec = by_name[name]
            totals[spec.dtype] = totals.get(spec.dtype, 0) + self._bytes(spec)
        return max(totals.values(), default=0)


def _read_table(path: Path, cluster: ClusterFacts) -> SizeTable:
    """A table that says where it was measured is refused elsewhere, as a plan is."""
    table, tuned = SizeTable.read(path), SizeTable.tuned_on(path)
    here = (cluster.ranks, cluster.nodes)
    if tuned is not None and tuned != here:
        raise ConfigError(
            "comm.sizes", str(path),
            f"was tuned on {tuned[0]} ranks of {tuned[1]} nodes, here are {here[0]} of {here[1]}",
            "run paceline tune here, or take its [cluster] section out to use it all the same",
        )  # fmt: skip
    return table


def _read_plan(path: str, tensors: Sequence[TensorSpec], cluster: ClusterFacts) -> FusionPlan:
    file = PlanFile.read(Path(path))
    model = ModelFacts.of((spec.name, spec.length) for spec in tensors)
    file.check(model, cluster, path)
    for number, buffer in enumerate(file.plan.buffers, start=1):
        check_name(buffer.algorithm, f"{path}: buffer {number}: algorithm")
        check_name(buffer.beside_algorithm, f"{path}: buffer {number}: beside")
        if buffer.wire not in WIRES:
            raise ConfigError(
                f"{path}: buffer {number}: wire",
                buffer.wire,
                "unknown",
                nearest(buffer.wire, WIRES),
            )
    file.plan.check([spec.name for spec in tensors])
    return file.plan
