"""`Workload`: one rank's step without communication, as a function of its batch.

In: a measured step (`paceline profile`) or an analysis of the model. Out: forward, backward, update and
input times, and for each gradient its size and the share of the backward pass after which it is ready.
Times are affine in the batch: a fixed part for launches and latency, and a part for each image.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w

from paceline.core.errors import ConfigError


@dataclass(frozen=True)
class Affine:
    """`fixed_s` + `per_image_s` · batch."""

    fixed_s: float
    per_image_s: float

    def at(self, batch: int) -> float:
        return self.fixed_s + self.per_image_s * batch

    def scaled(self, factor: float) -> Affine:
        return Affine(self.fixed_s * factor, self.per_image_s * factor)


@dataclass(frozen=True)
class Gradient:
    """`ready` is the share of the backward pass that is over when it is there, 0 to 1; `half` says that
    it is held, and travels unless told otherwise, in 16 bits."""

    name: str
    elements: int
    half: bool
    ready: float


@dataclass(frozen=True)
class Workload:
    """Gradients in the order in which backward makes them ready. `spread` is the relative standard
    error of the times, `source` where they come from."""

    model: str
    gradients: tuple[Gradient, ...]
    forward: Affine
    backward: Affine
    update_s: float
    input: Affine = Affine(0.0, 0.0)
    spread: float = 0.1
    source: str = ""

    def __post_init__(self) -> None:
        if not self.gradients:
            raise _error("gradients", None, "is empty", "profile a model that has parameters")
        for name in ("forward", "backward", "input"):
            times: Affine = getattr(self, name)
            for part, value in asdict(times).items():
                if not 0 <= value < math.inf:
                    raise _error(f"{name}.{part}", value, "must be 0 or more", "profile it again")
        if not 0 <= self.update_s < math.inf:
            raise _error("update_s", self.update_s, "must be 0 or more", "profile it again")
        if self.forward.at(1) + self.backward.at(1) <= 0:
            raise _error("backward", 0.0, "a step takes no time", "profile it again")
        last = 0.0
        for gradient in self.gradients:
            if gradient.elements < 0 or not last <= gradient.ready <= 1:
                raise _error(
                    f"gradients.{gradient.name}", gradient.ready,
                    "shares must rise from 0 to 1 in the order of the list", "profile it again",
                )  # fmt: skip
            last = gradient.ready

    def compute_s(self, batch: int) -> float:
        """Forward, backward and update."""
        return self.forward.at(batch) + self.backward.at(batch) + self.update_s

    def ready_s(self, batch: int) -> list[float]:
        """When each gradient is there, from the start of the backward pass."""
        backward = self.backward.at(batch)
        return [gradient.ready * backward for gradient in self.gradients]

    @property
    def elements(self) -> int:
        return sum(gradient.elements for gradient in self.gradients)

    def to_table(self) -> dict[str, Any]:
        table = asdict(self)
        table["gradients"] = [asdict(gradient) for gradient in self.gradients]
        return {"workload": table}

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Workload:
        try:
            values = dict(table["workload"])
            for name in ("forward", "backward", "input"):
                values[name] = Affine(**values[name])
            values["gradients"] = tuple(Gradient(**row) for row in values["gradients"])
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise _error("workload", None, f"not a profile ({error})", "make it anew") from None

    @classmethod
    def read(cls, path: Path) -> Workload:
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(
                "--profile", str(path), f"cannot be read ({error})", "make it with paceline profile"
            ) from error
        return cls.from_table(table)

    def write(self, path: Path) -> None:
        path.write_text(tomli_w.dumps(self.to_table()), encoding="utf-8")


def _error(field: str, value: object, problem: str, remedy: str) -> ConfigError:
    return ConfigError(f"profile: {field}", value, problem, remedy)
