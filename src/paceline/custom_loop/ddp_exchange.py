"""`Exchange`: the algorithms and the wire format with which a `DataParallel` sums gradients."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from paceline.comm.hybrid import HybridAllReduce
from paceline.comm.plan_choice import checked_table
from paceline.comm.planned_transport import WireFormat
from paceline.comm.process_groups import ProcessGroups
from paceline.core.errors import ConfigError, PacelineError
from paceline.custom_loop.context import timeout_here, topology_here
from paceline.plan.plan_file import ClusterFacts, PlanFile
from paceline.plan.schedules import NATIVE, check_name
from paceline.plan.size_table import SizeTable


@dataclass(frozen=True)
class Exchange:
    """The algorithms and the wire format with which ranks sum gradients.

    Attributes:
        table: The algorithm for each range of message sizes; None for the backend's own all-reduce.
        wire: Name of the wire format.
        file: The plan file, which also describes the cluster on which `table` was measured.
    """

    table: SizeTable | None = None
    wire: str = "float32"
    file: PlanFile | None = None

    @property
    def is_native(self) -> bool:
        """True if DDP sums gradients without a communication hook of Paceline."""
        return self.table is None and self.wire == "float32"

    @classmethod
    def choose(
        cls, plan: str | PathLike[str] | None, wire: str | None, algorithm: str | None
    ) -> Exchange:
        """Chooses algorithms and wire format from the arguments of `DataParallel`.

        Raises:
            ConfigError: If an argument is invalid.
        """
        if wire is not None:
            wire = WireFormat.named(wire, field="wire").name
        if plan is None:
            if algorithm is not None:
                check_name(algorithm, "algorithm")
            native = algorithm in (None, NATIVE)
            table = None if native else SizeTable.single(str(algorithm))
            return cls(table, wire or "float32")
        if algorithm is not None:
            raise ConfigError(
                "algorithm", algorithm, f"conflicts with plan = {str(plan)!r}, which sets the algorithm",
                "leave one of the two out",
            )  # fmt: skip
        file = PlanFile.read(Path(plan), "plan")
        return cls(_table(file), wire or _planned_wire(file), file)

    def create(self) -> HybridAllReduce:
        """Creates the communication hook and its process groups. All ranks call this."""
        groups = ProcessGroups(topology_here(), timeout_s=timeout_here())
        try:
            problem = None
            if self.file is not None and self.file.sizes is not None:
                here = ClusterFacts(groups.world_size, len(groups.layout.groups))
                try:
                    checked_table(self.file, here, "plan")
                except PacelineError as error:
                    problem = error
            # All ranks fail together: no rank must close its connections while another opens them.
            groups.check_same({"the plan": str(problem or "fits")})
            if problem is not None:
                raise problem
            return HybridAllReduce(groups, self.table or SizeTable.single(NATIVE), self.wire)
        except PacelineError:
            groups.close()
            raise


def _table(file: PlanFile) -> SizeTable:
    """Returns the algorithms by message size that a plan contains.

    If a plan has none, returns the one algorithm that all its buckets use.
    """
    if file.sizes is not None:
        return file.sizes
    names = {bucket.algorithm for bucket in file.fusion.buckets} if file.fusion else set()
    if len(names) != 1:
        raise ConfigError("plan", file.path, "lacks algorithms by size", "use one of paceline tune")
    return SizeTable.single(names.pop())


def _planned_wire(file: PlanFile) -> str:
    wires = {bucket.wire for bucket in file.fusion.buckets} if file.fusion else {"auto"}
    if len(wires) > 1:
        raise ConfigError(
            "plan", file.path, f"has buckets of several wire formats ({', '.join(sorted(wires))})",
            "choose one with wire=",
        )  # fmt: skip
    wire = wires.pop()
    return "float32" if wire == "auto" else wire
