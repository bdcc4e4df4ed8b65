"""Chooses the gradient buckets of a run (fusion plan), by the order in which gradients are ready.

The choice depends on the settings, the files that the settings name, the trained tensors and the
cluster. The order of the gradients is recorded in one backward pass. Every rank chooses the same plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.comm.settings import CommSettings, HybridSettings
from paceline.core.errors import ConfigError
from paceline.plan.fusion_plan import FusionBucket, FusionPlan, TensorSpec
from paceline.plan.plan_file import ClusterFacts, ModelFacts, PlanFile
from paceline.plan.schedules import NATIVE, check_name
from paceline.plan.size_choice import (
    MARGIN,
    careful_table,
    choose_bucket_bytes,
)
from paceline.plan.size_table import MeasuredSize, SizeTable
from paceline.plan.wires import own_algorithm, wire_bytes, wire_format

# Assumed bytes of a bucket's smaller messages: some hundred elements of signals, norms and biases.
_BESIDE_BYTES = 4096
# How much faster than the backend's own another algorithm must be for `auto`. If there is one node, or
# one rank on each, no algorithm sends fewer bytes over slow links, and samples differ by about as much as
# algorithms do. Over NCCL, CUDA graphs cannot contain other algorithms, so that their buckets may have to
# wait for the end of the backward pass.
_FLAT_MARGIN, _NCCL_MARGIN = 0.2, 0.25


@dataclass(frozen=True)
class Constants:
    """The measured constants of a cluster, and a text for the user.

    `file` contains the links and the median times of the algorithms; it is None if the backend's own
    all-reduce is used without a measurement.
    """

    file: PlanFile | None = None
    note: str = ""


@dataclass(frozen=True)
class PlanChoice:
    """The gradient buckets of a run, or the settings from which they follow.

    `fixed` is the plan, or None if the plan depends on the order of the gradients. `table` contains the
    algorithm for each bucket size. `measured` contains the times by which `auto` chooses.
    """

    settings: CommSettings
    tensors: tuple[TensorSpec, ...]
    table: SizeTable
    fixed: FusionPlan | None
    measured: tuple[MeasuredSize, ...] = ()

    @classmethod
    def read(
        cls, settings: CommSettings, tensors: Sequence[TensorSpec], cluster: ClusterFacts,
        constants: PlanFile | None = None,
    ) -> PlanChoice:  # fmt: skip
        """Reads the files that the settings name.

        Args:
            settings: The section `[comm]`.
            tensors: The trained tensors, as the model declares them.
            cluster: The number of ranks and nodes.
            constants: The measured constants of the cluster, by which `auto` chooses; None means the
                backend's own all-reduce.

        Raises:
            ConfigError: If a file does not fit the model or the cluster.
        """
        table, fixed = SizeTable.single(NATIVE), None
        measured: tuple[MeasuredSize, ...] = ()
        if settings.plan:
            file = PlanFile.read(Path(settings.plan))
            if file.fusion is None and file.sizes is not None:
                table = checked_table(file, cluster, "comm.plan")
            else:
                fixed = _checked_plan(file, tensors, cluster)
        elif settings.algorithm == "hybrid":
            table = _hybrid_table(settings.of("hybrid", HybridSettings), cluster)
        elif settings.algorithm != "auto":
            table = SizeTable.single(settings.algorithm)
        elif cluster.ranks == 1:
            # A single rank sends nothing, and one bucket costs the least.
            fixed = FusionPlan.single([spec.name for spec in reversed(tensors)])
        elif constants is not None and constants.probed is not None:
            measured, probed = constants.measured, constants.probed
            flat = 1 in (len(probed.ranks_per_node), max(probed.ranks_per_node))
            margin = _FLAT_MARGIN if flat else MARGIN
            margin = _NCCL_MARGIN if probed.backend == "nccl" else margin
            table = careful_table(measured, margin)
        choice = cls(settings, tuple(tensors), table, fixed, measured)
        fits_one_bucket = 0 < choice._most_bytes >= sum(map(choice._bytes, tensors))
        if fixed is None and (not tensors or fits_one_bucket):
            # A single bucket is sent after all gradients are ready, so their order does not matter.
            fixed = choice.plan([spec.name for spec in reversed(tensors)])
        return replace(choice, fixed=fixed)

    def plan(self, order: Sequence[str]) -> FusionPlan:
        """Returns the plan for gradients that become ready in the given order."""
        if self.fixed is not None:
            return self.fixed
        by_name = {spec.name: spec for spec in self.tensors}
        sizes = [(name, self._bytes(by_name[name])) for name in order]
        threshold = self._most_bytes
        if self.measured and self.settings.fusion_mib == CommSettings.fusion_mib:
            threshold = choose_bucket_bytes(sizes, self.table, self.measured)
        pools = FusionPlan.by_threshold(sizes, threshold, wire=self.settings.wire)
        return FusionPlan(tuple(self._with_algorithms(pool, by_name) for pool in pools.buckets))

    def _with_algorithms(self, pool: FusionBucket, by_name: dict[str, TensorSpec]) -> FusionBucket:
        if own := own_algorithm(self.settings.wire):
            return replace(pool, algorithm=own, beside=NATIVE)
        bulk = self.table.choose(self._bulk_bytes(pool, by_name))
        small = self.table.choose(_BESIDE_BYTES)
        return replace(pool, algorithm=bulk, beside=small if small != bulk else "")

    @property
    def _most_bytes(self) -> int:
        return int(self.settings.fusion_mib * 2**20)

    def _bytes(self, spec: TensorSpec) -> int:
        """Returns the size of a tensor's gradient in the format in which it is sent."""
        return wire_bytes(spec.length, spec.dtype, self.settings.wire)

    def _bulk_bytes(self, pool: FusionBucket, by_name: dict[str, TensorSpec]) -> int:
        """Returns the size of a bucket's largest message. Each dtype of the bucket is one message."""
        totals: dict[str, int] = {}
        for name in pool.tensors:
            spec = by_name[name]
            totals[spec.dtype] = totals.get(spec.dtype, 0) + self._bytes(spec)
        return max(totals.values(), default=0)


def _hybrid_table(settings: HybridSettings, cluster: ClusterFacts) -> SizeTable:
    if settings.eta_kib is not None:
        return SizeTable.two_way(1024 * settings.eta_kib)
    file = PlanFile.read(Path(settings.sizes), "comm.hybrid.sizes")
    return checked_table(file, cluster, "comm.hybrid.sizes")


def checked_table(file: PlanFile, cluster: ClusterFacts, setting: str) -> SizeTable:
    """Returns the all-reduce algorithms by message size that a plan file contains.

    Raises ConfigError if the file was measured on another cluster.

    Args:
        file: The plan file.
        cluster: The number of ranks and nodes of this run.
        setting: The setting that names the file, for error messages.
    """
    tuned = file.cluster
    if tuned is not None and tuned != cluster:
        raise ConfigError(
            setting, file.path,
            f"was tuned on {tuned.ranks} ranks of {tuned.nodes} nodes; this job has {cluster.ranks} of "
            f"{cluster.nodes}",
            "run paceline tune here, or remove its [cluster] section to use it anyway",
        )  # fmt: skip
    return file.table


def _checked_plan(
    file: PlanFile, tensors: Sequence[TensorSpec], cluster: ClusterFacts
) -> FusionPlan:
    plan, path = file.plan, file.path
    file.check(ModelFacts.of((spec.name, spec.length) for spec in tensors), cluster, path)
    for number, bucket in enumerate(plan.buckets, start=1):
        where = f"{path}: bucket {number}"
        own = wire_format(bucket.wire, f"{where}: wire").algorithm
        if own and bucket.algorithm != own:
            raise ConfigError(
                f"{where}: algorithm", bucket.algorithm,
                f"cannot sum {bucket.wire} gradients", f"use {own!r}, or another wire format",
            )  # fmt: skip
        if not own:
            check_name(bucket.algorithm, f"{where}: algorithm")
        check_name(bucket.beside_algorithm, f"{where}: beside")
    plan.check([spec.name for spec in tensors])
    return plan


def record_order(
    trained: Mapping[str, nn.Parameter], backward: Callable[[], None]
) -> tuple[str, ...]:
    """Returns the order in which `backward` completes gradients.

    A parameter that is used several times gets its position when its gradient is complete. Parameters
    without a gradient come last. Afterwards all gradients are None.

    Args:
        trained: The trained parameters by name.
        backward: Runs one backward pass.
    """
    arrived: dict[str, None] = {}

    def note(name: str) -> Callable[[Tensor], None]:
        def arrives(parameter: Tensor) -> None:
            arrived.pop(name, None)  # the last arrival counts
            arrived[name] = None

        return arrives

    handles = [
        parameter.register_post_accumulate_grad_hook(note(name))  # type: ignore[no-untyped-call]
        for name, parameter in trained.items()
    ]
    try:
        backward()
    finally:
        for handle in handles:
            handle.remove()
        for parameter in trained.values():
            parameter.grad = None
    return (*arrived, *(name for name in reversed(list(trained)) if name not in arrived))


def agree_order(group: Group, order: Sequence[str]) -> tuple[str, ...]:
    """Returns rank 0's order of gradients on every rank. All ranks must have the same parameters."""
    payload = json.dumps(list(order)).encode() if group.rank == 0 else None
    return tuple(json.loads(group.broadcast_bytes(payload)))
