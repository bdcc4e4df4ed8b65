"""`Expected`: what the planner said of a plan, kept with it, so that a run can be held against it.

In: a prediction, or the `[expected]` table of a plan file. Out: seconds of a step and its parts, and of
each buffer. A file without the table, or with another one, expects nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.core.untrusted import is_count, is_finite

if TYPE_CHECKING:  # what reads a file needs no NumPy
    from paceline.plan.prediction import Prediction


@dataclass(frozen=True)
class Expected:
    """`buffers_s` is the time that each buffer's exchange takes; `batch` that of a rank."""

    batch: int
    step_s: float
    compute_s: float
    exposed_comm_s: float
    input_stall_s: float
    uncertainty: float
    buffers_s: tuple[float, ...]

    @classmethod
    def of(cls, prediction: Prediction) -> Expected:
        return cls(
            batch=prediction.batch,
            step_s=prediction.step_s,
            # A run sees its compute as it is, slowed by what it hides.
            compute_s=prediction.compute_s + prediction.hidden_comm_s,
            exposed_comm_s=prediction.exposed_comm_s,
            input_stall_s=prediction.input_stall_s,
            uncertainty=prediction.uncertainty,
            buffers_s=tuple(score.cost_s for score in prediction.scores),
        )

    def to_table(self) -> dict[str, Any]:
        return {**vars(self), "buffers_s": list(self.buffers_s)}

    @classmethod
    def from_table(cls, table: object) -> Expected | None:
        if not isinstance(table, Mapping) or table.keys() != cls.__dataclass_fields__.keys():
            return None
        batch, buffers = table["batch"], table["buffers_s"]
        parts = {k: v for k, v in table.items() if k not in ("batch", "buffers_s")}
        if not isinstance(buffers, list) or not is_count(batch, 1):
            return None
        if not all(is_finite(seconds) and seconds >= 0 for seconds in (*buffers, *parts.values())):
            return None
        return cls(
            batch=batch,
            buffers_s=tuple(float(seconds) for seconds in buffers),
            **{name: float(seconds) for name, seconds in parts.items()},
        )
