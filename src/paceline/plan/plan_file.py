"""`PlanFile`: a fusion plan on disk, with the model and the cluster that it was made for.

In: a TOML file, written by a planner or by hand. Out: the plan, or one line that says which model or
cluster it belongs to. The facts are plain numbers and a digest: names and sizes of the trained tensors
in any order, ranks and nodes. Without torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from paceline.core.errors import ConfigError
from paceline.core.untrusted import ParseError, parse_toml
from paceline.plan.expected import Expected
from paceline.plan.fusion_plan import FusionPlan

_FIELD = "comm.plan"
Facts = TypeVar("Facts", "ModelFacts", "ClusterFacts")


@dataclass(frozen=True)
class ModelFacts:
    """The trained tensors, whatever their order and number format."""

    tensors: int
    elements: int
    digest: str

    @classmethod
    def of(cls, sizes: Iterable[tuple[str, int]]) -> ModelFacts:
        """From names and numbers of elements."""
        rows = sorted(sizes)
        text = "\n".join(f"{name} {elements}" for name, elements in rows)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return cls(len(rows), sum(elements for _, elements in rows), digest)

    def describe(self) -> str:
        return f"{self.tensors} tensors of {self.elements:,} elements ({self.digest})"


@dataclass(frozen=True)
class ClusterFacts:
    """What an algorithm's choice depends on."""

    ranks: int
    nodes: int

    def describe(self) -> str:
        return f"ranks = {self.ranks}, nodes = {self.nodes}"


@dataclass(frozen=True)
class PlanFile:
    """A plan and what it was made for; and, from a planner, what it expects of it."""

    plan: FusionPlan
    model: ModelFacts
    cluster: ClusterFacts
    expected: Expected | None = None

    def check(self, model: ModelFacts, cluster: ClusterFacts, path: str) -> None:
        """Refuses the plan of another model or cluster."""
        there: ModelFacts | ClusterFacts
        here: ModelFacts | ClusterFacts
        for what, there, here in (
            ("model", self.model, model),
            ("cluster", self.cluster, cluster),
        ):
            if there != here:
                raise ConfigError(
                    _FIELD, path,
                    f"is for a {what} with {there.describe()}, this {what} has {here.describe()}",
                    f"make a plan for this {what}, or leave comm.plan out",
                )  # fmt: skip

    def write(self, path: Path) -> None:
        tables = {"model": asdict(self.model), "cluster": asdict(self.cluster)}
        if self.expected is not None:
            tables["expected"] = self.expected.to_table()
        text = tomli_w.dumps(tables | self.plan.to_table(), multiline_strings=False)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                "plan file", str(path), f"cannot be written ({error.strerror})", "mend the path"
            ) from None

    @classmethod
    def read(cls, path: Path) -> PlanFile:
        """Unreadable, foreign and incomplete files fail in one line each."""
        try:
            tables = parse_toml(path.read_bytes())
        except OSError as error:
            raise ConfigError(
                _FIELD, str(path), f"cannot be read ({error.strerror})", "check the path"
            ) from None
        except ParseError as error:
            raise ConfigError(
                _FIELD, str(path), f"is not TOML: {error}", "mend it, or make it anew"
            ) from None
        try:
            plan = FusionPlan.from_table(tables)
        except ConfigError as error:
            raise ConfigError(_FIELD, str(path), error.cause, "make it anew") from None
        model = _facts(ModelFacts, tables.get("model"), path, "model")
        cluster = _facts(ClusterFacts, tables.get("cluster"), path, "cluster")
        return cls(plan, model, cluster, Expected.from_table(tables.get("expected")))


def _facts(kind: type[Facts], table: object, path: Path, section: str) -> Facts:
    wanted = kind.__dataclass_fields__
    if isinstance(table, Mapping) and table.keys() == wanted.keys():
        values: dict[str, Any] = dict(table)
        if all(type(values[name]).__name__ == field.type for name, field in wanted.items()):
            return kind(**values)
    raise ConfigError(
        _FIELD, str(path), f"has no section [{section}] with {', '.join(wanted)}", "make it anew"
    )
