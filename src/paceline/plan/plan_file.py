"""`PlanFile`: the file plan.toml, which stores a fusion plan and measurements of a cluster.

`paceline tune` writes the file, and `paceline train --plan` executes its plan. `paceline plan` uses its
measurements (`--cluster`, `--profile`), and a run stores the executed plan in this format. This module
does not import torch. Every section is optional:

    why           what was measured and chosen, in sentences
    [model]       the model that the plan is for: number and sizes of the trained tensors
    [cluster]     ranks and nodes; if the links were measured also backend, device, hidden_cost, and the
                  cost of a message inside a node, [cluster.intra], and between nodes, [cluster.inter]
    [expected]    the predicted step time of the plan, so that a run can be compared with it
    [start_up]    the predicted time before the first step
    [[buffer]]    the plan: for each bucket the tensors, the algorithm and the wire format
    [[sizes]]     the algorithm for each buffer size
    [[measured]]  the median time for each buffer size and algorithm
    [workload]    the profiled training step
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from paceline.core.errors import ConfigError, nearest
from paceline.core.files import read_regular
from paceline.core.settings import convert, errors_of_file, from_table
from paceline.core.topology import RANKS_LIMIT
from paceline.core.untrusted import (
    LONGEST_S,
    SHORTEST_S,
    is_count,
    is_finite,
    parse_toml,
    short_repr,
)
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.schedules import check_name
from paceline.plan.size_table import MeasuredSize, SizeTable

_SECTIONS = (
    "why", "model", "cluster", "expected", "start_up", "buffer", "sizes", "measured", "workload",
)  # fmt: skip
_ANEW = "make it anew"
Facts = TypeVar("Facts", "ModelFacts", "ClusterFacts")
Part = TypeVar("Part")


@dataclass(frozen=True)
class ModelFacts:
    """Number and size of the trained tensors, and a digest of their names and sizes.

    They identify the model for which a plan was made, and do not depend on the order and dtype of
    the tensors.
    """

    tensors: int
    elements: int
    digest: str

    @classmethod
    def of(cls, sizes: Iterable[tuple[str, int]]) -> ModelFacts:
        """Computes the facts of a model from pairs of name and number of elements of each tensor."""
        rows = sorted(sizes)
        text = "\n".join(f"{name} {elements}" for name, elements in rows)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return cls(len(rows), sum(elements for _, elements in rows), digest)

    def describe(self) -> str:
        return f"{self.tensors} tensors of {self.elements:,} elements ({self.digest})"


@dataclass(frozen=True)
class ClusterFacts:
    """The number of ranks and nodes for which a plan was made."""

    ranks: int
    nodes: int

    def describe(self) -> str:
        return f"ranks = {self.ranks}, nodes = {self.nodes}"


@dataclass(frozen=True)
class LinkFacts:
    """The cost of a message, measured between the slowest pair of ranks.

    A message of m bytes takes `alpha_s` + m · `beta_s_per_byte` seconds. `residual` is the relative
    error of this formula for the measured messages. `contention` is the factor by which a message
    takes longer if all ranks send concurrently.
    """

    alpha_s: float
    beta_s_per_byte: float
    residual: float = 0.0
    contention: float = 1.0


@dataclass(frozen=True)
class ProbedCluster:
    """The measured links of a cluster.

    Attributes:
        ranks_per_node: Number of ranks on each node.
        backend: The backend of torch.distributed.
        device: The type of the device.
        intra: The cost of a message inside a node; None if no node has two ranks.
        inter: The cost of a message between nodes; None if there is one node.
        hidden_cost: Seconds by which one second of communication delays concurrent compute. None if
            this delay was not measured.
    """

    ranks_per_node: tuple[int, ...]
    backend: str = ""
    device: str = "cpu"
    intra: LinkFacts | None = None
    inter: LinkFacts | None = None
    hidden_cost: float | None = None

    @property
    def facts(self) -> ClusterFacts:
        return ClusterFacts(sum(self.ranks_per_node), len(self.ranks_per_node))

    def to_table(self) -> dict[str, Any]:
        links = {"intra": self.intra, "inter": self.inter}
        return {
            **asdict(self.facts), "ranks_per_node": list(self.ranks_per_node),
            "backend": self.backend, "device": self.device,
            **({} if self.hidden_cost is None else {"hidden_cost": self.hidden_cost}),
            **{name: asdict(link) for name, link in links.items() if link is not None},
        }  # fmt: skip

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> ProbedCluster:
        counts = table["ranks_per_node"]
        if not isinstance(counts, list) or not all(is_count(n, 1, RANKS_LIMIT) for n in counts):
            raise ConfigError(
                "cluster.ranks_per_node", counts,
                f"must be a list of counts from 1 to {RANKS_LIMIT:,}", "run paceline tune again",
            )  # fmt: skip
        # The table also contains the numbers of ranks and nodes, which follow from `ranks_per_node`.
        known = cls.__dataclass_fields__
        return from_table(cls, "cluster", {k: v for k, v in table.items() if k in known})


@dataclass(frozen=True)
class Expected:
    """The predicted times of a step with the plan: the section `[expected]`.

    `buffers_s` lists the predicted seconds of each bucket's all-reduce. `batch` is the batch size
    of one rank.
    """

    batch: int
    step_s: float
    compute_s: float
    exposed_comm_s: float
    input_stall_s: float
    uncertainty: float
    buffers_s: tuple[float, ...]

    def to_table(self) -> dict[str, Any]:
        return {**vars(self), "buffers_s": list(self.buffers_s)}

    @classmethod
    def from_table(cls, table: Any) -> Expected | None:
        """Builds the prediction from a table; returns None if the table is invalid."""
        try:
            prediction = from_table(cls, "expected", table)
        except ConfigError:
            return None
        *parts, buffers_s = vars(prediction).values()
        return prediction if prediction.batch >= 1 and min(*parts, *buffers_s) >= 0 else None


@dataclass(frozen=True)
class PlanFile:
    """The contents of a plan file.

    Attributes:
        fusion: The plan: buckets of gradients and their all-reduces.
        model: The model that the plan was made for.
        cluster: The cluster that the plan was made for.
        expected: The planner's prediction for the plan.
        sizes: The algorithm for each buffer size.
        measured: The measured times of each buffer size.
        chosen: The chosen algorithm of each measured size.
        probed: The measured latencies and bandwidths of the cluster.
        workload: The profiled step, which `paceline.planner.plan_parts` reads.
        why: Sentences that explain what was measured and chosen.
        start_up: The predicted time before the first step, which `paceline.planner.plan_parts` reads.
        path: The path of the file, for error messages.
        setting: The setting that named the file, for error messages.
    """

    fusion: FusionPlan | None = None
    model: ModelFacts | None = None
    cluster: ClusterFacts | None = None
    expected: Expected | None = None
    sizes: SizeTable | None = None
    measured: tuple[MeasuredSize, ...] = ()
    chosen: tuple[str, ...] = ()
    probed: ProbedCluster | None = None
    workload: Mapping[str, Any] | None = None
    why: tuple[str, ...] = ()
    start_up: Mapping[str, Any] | None = None
    path: str = field(default="", compare=False)
    setting: str = field(default="comm.plan", compare=False)

    @property
    def plan(self) -> FusionPlan:
        """The plan of buckets and all-reduces. Raises ConfigError if the file has none."""
        return self.given(
            self.fusion, self.setting, "has no plan: no [[buffer]]",
            "run paceline tune with --model or a recipe",
        )  # fmt: skip

    @property
    def table(self) -> SizeTable:
        """The algorithm for each buffer size. Raises ConfigError if the file has none."""
        return self.given(
            self.sizes, "comm.hybrid.sizes", "has no table of sizes: no [[sizes]]",
            "write rows of up_to_bytes and algorithm, or run paceline tune",
        )  # fmt: skip

    def given(self, part: Part | None, name: str, problem: str, remedy: str) -> Part:
        """Returns `part`. If it is None, raises a ConfigError with the other arguments."""
        if part is None:
            raise ConfigError(name, self.path, problem, remedy)
        return part

    def check(self, model: ModelFacts, cluster: ClusterFacts, path: str) -> None:
        """Checks that the plan was made for this model and cluster. Raises ConfigError otherwise.

        Args:
            model: The model of this run.
            cluster: The cluster of this run.
            path: The path of the file, for the error message.
        """
        there: ModelFacts | ClusterFacts | None
        here: ModelFacts | ClusterFacts
        for what, there, here in (
            ("model", self.model, model),
            ("cluster", self.cluster, cluster),
        ):
            if there is not None and there != here:
                raise ConfigError(
                    self.setting, path,
                    f"is for a {what} with {there.describe()}, but this {what} has {here.describe()}",
                    f"make a plan for this {what}, or leave {self.setting} out",
                )  # fmt: skip

    def to_tables(self) -> dict[str, Any]:
        tables: dict[str, Any] = {"why": list(self.why)} if self.why else {}
        if self.model is not None:
            tables["model"] = asdict(self.model)
        if self.probed is not None:
            tables["cluster"] = self.probed.to_table()
        elif self.cluster is not None:
            tables["cluster"] = asdict(self.cluster)
        if self.expected is not None:
            tables["expected"] = self.expected.to_table()
        if self.start_up is not None:
            tables["start_up"] = dict(self.start_up)
        if self.fusion is not None:
            tables |= self.fusion.to_table()
        if self.sizes is not None:
            tables |= self.sizes.to_table()
        if self.measured:
            chosen = self.chosen or ("",) * len(self.measured)
            tables["measured"] = [
                {
                    "bytes": row.size_bytes,
                    **({"chosen": name} if name else {}),
                    "spread": float(f"{row.spread:.3g}"),
                    "median_s": dict(row.medians_s),
                }
                for row, name in zip(self.measured, chosen, strict=True)
            ]
        if self.workload is not None:
            tables["workload"] = dict(self.workload)
        return tables

    def constants(self) -> dict[str, Any]:
        """Returns the tables of the measured cluster; {} if nothing was measured."""
        tables = self.to_tables() if self.measured else {}
        return {name: tables[name] for name in ("cluster", "measured") if name in tables}

    def to_text(self) -> str:
        return tomli_w.dumps(self.to_tables())

    def write(self, path: Path) -> None:
        try:
            path.write_text(self.to_text(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                "plan file", str(path), f"cannot be written ({error.strerror})", "choose another"
            ) from None

    @classmethod
    def read(cls, path: Path, setting: str = "comm.plan") -> PlanFile:
        """Reads a plan file. Raises ConfigError if the file is unreadable, invalid or incomplete.

        Args:
            path: The path of the file.
            setting: The setting that contains the path, for error messages.
        """
        with errors_of_file(setting, path, f"fix it, or {_ANEW}", _ANEW):
            tables = parse_toml(read_regular(path))
        return cls.from_tables(tables, path, setting)

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any], path: Path, setting: str) -> PlanFile:
        """Builds a plan file from the result of `to_tables`. Raises ConfigError if it is invalid.

        Args:
            tables: The tables, which may come from anywhere.
            path: Their file, for error messages.
            setting: The setting that contains the path, for error messages.
        """
        for name in tables:
            if name not in _SECTIONS:
                raise ConfigError(
                    setting, str(path), f"has an unknown section {short_repr(name)}",
                    nearest(name, _SECTIONS),
                )  # fmt: skip
        with errors_of_file(setting, path, _ANEW, _ANEW):
            return replace(_from_tables(tables), path=str(path), setting=setting)


def _from_tables(tables: Mapping[str, Any]) -> PlanFile:
    fusion = FusionPlan.from_table(tables) if "buffer" in tables else None
    model = cluster = probed = workload = None
    if fusion is not None or "model" in tables:
        model = _facts(ModelFacts, tables.get("model"), "model")
    table = tables.get("cluster")
    if isinstance(table, Mapping) and "ranks_per_node" in table:
        probed = ProbedCluster.from_table(table)
        cluster = probed.facts
    elif fusion is not None or "cluster" in tables:
        cluster = _facts(ClusterFacts, table, "cluster")
    if "workload" in tables:
        workload = tables["workload"]
        if not isinstance(workload, Mapping):
            raise ConfigError("workload", workload, "is not a table", "profile it again")
    measured, chosen = _measured(tables.get("measured", []))
    why = convert(tables.get("why", []), tuple[str, ...], "why")
    sizes = SizeTable.from_table(tables) if "sizes" in tables else None
    expected = Expected.from_table(tables.get("expected"))
    start_up = tables.get("start_up")
    return PlanFile(
        fusion=fusion, model=model, cluster=cluster, expected=expected, sizes=sizes,
        measured=measured, chosen=chosen, probed=probed, workload=workload, why=why,
        start_up=start_up if isinstance(start_up, Mapping) else None,
    )  # fmt: skip


def _facts(kind: type[Facts], table: object, section: str) -> Facts:
    wanted = kind.__dataclass_fields__
    if not isinstance(table, Mapping) or not wanted.keys() <= table.keys():
        raise ConfigError(section, None, f"has no section [{section}] with {', '.join(wanted)}")
    return from_table(kind, section, {name: table[name] for name in wanted})


def _measured(rows: Any) -> tuple[tuple[MeasuredSize, ...], tuple[str, ...]]:
    if not isinstance(rows, list):
        raise ConfigError("measured", rows, "is not a list of tables", "run paceline tune again")
    sizes, chosen = [], []
    for number, row in enumerate(rows):
        medians = row.get("median_s") if isinstance(row, Mapping) else None
        name = f"measured[{number}]"
        if not isinstance(medians, Mapping) or not is_count(row.get("bytes"), 1):
            raise ConfigError(
                name, row, "must be a table with bytes and median_s", "run paceline tune again"
            )
        spread = row.get("spread", 0.0)  # older files have none
        for algorithm, seconds in medians.items():
            check_name(algorithm, f"{name}.median_s")
            if not is_finite(seconds) or not SHORTEST_S <= seconds <= LONGEST_S:
                raise ConfigError(
                    f"{name}.median_s.{algorithm}", seconds,
                    f"must be from {SHORTEST_S:g} to {LONGEST_S:g} s", "run paceline tune again",
                )  # fmt: skip
        if not is_finite(spread) or row.get("chosen", "") not in ("", *medians):
            raise ConfigError(
                name, row, "chooses an algorithm that was not measured", "run paceline tune again"
            )
        sizes.append(MeasuredSize(row["bytes"], dict(medians), float(spread)))
        chosen.append(row.get("chosen", ""))
    return tuple(sizes), tuple(chosen) if any(chosen) else ()
