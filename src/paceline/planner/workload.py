"""`Workload`: the compute times of one rank's step, as functions of the batch size.

`fit_workload` builds a workload from measured steps, and `analytic_workload` from a network and a chip. A
time is affine in the batch: a fixed part for launches and latency, and a part for each image. A third
term makes small batches slower if they leave a part of the chip idle.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from paceline.core.errors import ConfigError
from paceline.core.settings import from_table
from paceline.core.untrusted import LONGEST_S, SHORTEST_S
from paceline.plan.optimizer import Gradient
from paceline.planner.layers import MOST_PIXELS

# The largest number of gradients: tables of the planner grow with the square of it.
_MOST_GRADIENTS = 4096
# Up to this number, sums of bytes are exact in 64-bit integers and in doubles.
_MOST_ELEMENTS = 2**48
# The largest batch of one rank; larger than any in use.
LARGEST_BATCH = 1 << 20
# The deviation of step times from a line, as a relative standard error: between profiled batches
# (`_LINE`), and for every doubling above and below them. `_ONE_…`: the factor by which a step can be off
# for every doubling from a single profiled batch. About 68 % and 95 % of 15 series of steps of six models
# on an H200 are within one and two of these standard errors (records/planner, coverage).
_LINE = 0.04
_LINE_ABOVE = 0.04
_LINE_BELOW = 0.07
_ONE_ABOVE = 1.22
_ONE_BELOW = 1.17


@dataclass(frozen=True)
class Affine:
    """A time as a function of the batch size.

    The time is `fixed_s` + `per_image_s` · batch + `fill_s` · exp(−batch / `fill_batch`). The last
    term models small batches: a matrix product whose tiles do not fill all multiprocessors takes as
    long as one whose tiles do.
    """

    fixed_s: float
    per_image_s: float
    fill_s: float = 0.0
    fill_batch: float = 1.0

    def at(self, batch: int) -> float:
        filling = self.fill_s * math.exp(-batch / self.fill_batch) if self.fill_s else 0.0
        return self.fixed_s + self.per_image_s * batch + filling

    def scaled(self, factor: float) -> Affine:
        return replace(
            self, fixed_s=self.fixed_s * factor, per_image_s=self.per_image_s * factor,
            fill_s=self.fill_s * factor,
        )  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """The compute times and gradient sizes of one rank's step, from which a cluster is predicted.

    Attributes:
        model: The name of the model.
        gradients: The gradients in the order in which the backward pass produces them.
        forward: The time of the forward pass.
        backward: The time of the backward pass.
        update_s: The time of the weight update in seconds.
        input: The time in which the input pipeline delivers a batch.
        spread: The relative standard error of the times.
        source: A text about the origin of the times.
        image_size: The edge length of the images in pixels; 0 if unknown.
        batches: The profiled batch sizes; empty if nothing was profiled.
        device: The profiled device, "cpu" or "cuda"; empty if nothing was profiled.
    """

    model: str
    gradients: tuple[Gradient, ...]
    forward: Affine
    backward: Affine
    update_s: float
    input: Affine = Affine(0.0, 0.0)
    spread: float = 0.1
    source: str = ""
    image_size: int = 0
    batches: tuple[int, ...] = ()
    device: str = ""

    def __post_init__(self) -> None:
        if not self.gradients:
            raise _error("gradients", None, "is empty", "profile a model that has parameters")
        for name in ("forward", "backward", "input"):
            times: Affine = getattr(self, name)
            for part, value in asdict(times).items():
                _check_seconds(f"{name}.{part}", value)
            if times.fill_batch < SHORTEST_S:
                raise _error(
                    f"{name}.fill_batch", times.fill_batch, "must be above 0", "profile it again"
                )
        _check_seconds("update_s", self.update_s)
        if self.forward.at(1) + self.backward.at(1) < SHORTEST_S:
            raise _error("backward", 0.0, "a step takes no time", "profile it again")
        if not 0 <= self.spread <= 1:
            raise _error("spread", self.spread, "must be from 0 to 1", "profile it again")
        if not 0 <= self.image_size <= MOST_PIXELS:
            raise _error("image_size", self.image_size, "is not an image size", "profile it again")
        if any(not 1 <= batch <= LARGEST_BATCH for batch in self.batches):
            raise _error("batches", list(self.batches), "are not batch sizes", "profile it again")
        self._check_gradients()

    def _check_gradients(self) -> None:
        names = Counter(gradient.name for gradient in self.gradients)
        name, count = names.most_common(1)[0]
        if count > 1:
            raise _error(f"gradients.{name}", None, "occurs twice", "profile it again")
        if len(self.gradients) > _MOST_GRADIENTS or self.elements > _MOST_ELEMENTS:
            raise _error(
                "gradients", len(self.gradients),
                f"must be at most {_MOST_GRADIENTS} with 2^48 elements in all", "profile it again",
            )  # fmt: skip
        last = 0.0
        for gradient in self.gradients:
            if gradient.elements < 0:
                raise _error(
                    f"gradients.{gradient.name}.elements", gradient.elements, "must be 0 or more",
                    "profile it again",
                )  # fmt: skip
            if not last <= gradient.ready <= 1:
                raise _error(
                    f"gradients.{gradient.name}.ready", gradient.ready,
                    "must be 0 to 1, and not below the gradient before it", "profile it again",
                )  # fmt: skip
            last = gradient.ready

    def fed_at(self, images_per_s: float) -> Workload:
        """Returns a copy whose input pipeline delivers `images_per_s`; 0 changes nothing."""
        return replace(self, input=Affine(0.0, 1 / images_per_s)) if images_per_s else self

    def is_extrapolated(self, batch: int) -> bool:
        """Returns True if `batch` is smaller or larger than all profiled batches."""
        return bool(self.batches) and not min(self.batches) <= batch <= max(self.batches)

    def spread_at(self, batch: int) -> float:
        """Returns the relative standard error of the step time at this batch size.

        Between profiled batches, step times deviate slightly from a line. Outside of their range, the
        deviation grows with every doubling, and the line itself is less certain. With a single profiled
        batch, the fixed part of a step is unknown.
        """
        if not self.batches or batch in self.batches:
            return self.spread
        low, high = min(self.batches), max(self.batches)
        doublings = max(0.0, math.log2(batch / high), math.log2(low / batch))
        if low == high:
            factor = _ONE_ABOVE if batch > high else _ONE_BELOW
            return math.hypot(self.spread, factor**doublings - 1)
        if not doublings:
            return max(self.spread, _LINE)
        weight = (batch - low) / (high - low)
        off = math.hypot(weight * self.compute_s(high), (1 - weight) * self.compute_s(low))
        line = self.spread * max(1.0, off / self.compute_s(batch))
        return math.hypot(line, _LINE, (_LINE_ABOVE if batch > high else _LINE_BELOW) * doublings)

    def with_tensors(self, tensors: Mapping[str, tuple[int, bool]]) -> Workload:
        """Returns a copy with the gradient sizes and number formats of a run, which may freeze tensors.

        Args:
            tensors: For each trained tensor, the number of elements, and True for half precision.
                Gradients of other tensors are removed.
        """
        gradients = tuple(
            replace(g, elements=tensors[g.name][0], half=tensors[g.name][1])
            for g in self.gradients
            if g.name in tensors
        )
        return replace(self, gradients=gradients)

    @property
    def in_half(self) -> bool:
        """True if the step runs in half precision."""
        return any(gradient.half for gradient in self.gradients)

    def compute_s(self, batch: int) -> float:
        """Returns the seconds of forward pass, backward pass and update."""
        return self.forward.at(batch) + self.backward.at(batch) + self.update_s

    def backward_s(self, batch: int) -> float:
        return self.backward.at(batch)

    def ready_s(self, batch: int) -> list[float]:
        """Returns the seconds from the start of the backward pass until each gradient is ready."""
        backward = self.backward.at(batch)
        return [gradient.ready * backward for gradient in self.gradients]

    @property
    def elements(self) -> int:
        return sum(gradient.elements for gradient in self.gradients)

    def to_table(self) -> dict[str, Any]:
        return {"workload": self.to_section()}

    def to_section(self) -> dict[str, Any]:
        """Returns the section of a plan file that `paceline.planner.plan_parts.profile_of` reads."""
        table = asdict(self)
        table["gradients"] = [asdict(gradient) for gradient in self.gradients]
        table["batches"] = list(self.batches)
        for name in ("forward", "backward", "input"):
            if not table[name]["fill_s"]:
                del table[name]["fill_s"], table[name]["fill_batch"]
        return table

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Workload:
        """Builds a workload from the section `[workload]` of a plan file.

        Raises:
            ConfigError: If a field is missing, unknown or out of range, or has the wrong type.
        """
        work = table.get("workload")
        if not isinstance(work, Mapping) or not isinstance(work.get("gradients"), list):
            problem = "has no [workload] with gradients"
            raise _error("workload", None, f"not a profile ({problem})", "profile it again")
        return from_table(cls, "profile", work)


def _check_seconds(field: str, value: float) -> None:
    if not 0 <= value <= LONGEST_S:
        raise _error(field, value, f"must be from 0 to {LONGEST_S:g} s", "profile it again")


def _error(field: str, value: object, problem: str, remedy: str) -> ConfigError:
    return ConfigError(f"profile: {field}", value, problem, remedy)


@dataclass(frozen=True)
class StepAnatomy:
    """How one measured step divides into forward, backward and update, in seconds.

    `gradients` lists the gradients in the order in which they become ready: name, number of elements,
    True for half precision, and seconds from the start of the backward pass.
    """

    forward_s: float
    backward_s: float
    update_s: float
    gradients: tuple[tuple[str, int, bool, float], ...]


def fit_workload(
    model: str, steps: Sequence[tuple[int, float]], anatomy: StepAnatomy, source: str,
    image_size: int = 0, device: str = "",
) -> Workload:  # fmt: skip
    """Builds a workload from the measured times of steps with several batch sizes.

    Args:
        model: The name of the model.
        steps: The batch size and the seconds of each measured step.
        anatomy: The parts of one step, by which the time of each step is divided.
        source: A text about the origin of the times.
        image_size: The edge length of the images in pixels; 0 if unknown.
        device: The device of the measurement, "cpu" or "cuda".

    Raises:
        ConfigError: If a larger batch took less time than a smaller one.
    """
    points = sorted(steps)
    for (small, faster), (large, slower) in itertools.pairwise(points):
        if large > small and slower <= faster:
            raise ConfigError(
                "--batch-size", f"{small}, {large}",
                f"{large} images took {1e3 * slower:.3g} ms, but {small} took {1e3 * faster:.3g} ms",
                "profile on a quiet machine, or with batches further apart",
            )  # fmt: skip
    # The update does not depend on the batch. With several batches, it cannot exceed the intercept of the
    # line: a step that is measured in parts runs eagerly, which can be slower than a CUDA graph.
    if len(points) > 1:
        fixed, per_image, spread = _line(points)
        update = min(anatomy.update_s, fixed)
        fixed -= update
    else:
        (batch, step), *_ = points
        update = min(anatomy.update_s, 0.9 * step)
        fixed, per_image, spread = _line([(batch, step - update)])
    share = anatomy.forward_s / (anatomy.forward_s + anatomy.backward_s)
    gradients = []
    last = 0.0
    for name, elements, half, ready in anatomy.gradients:
        last = min(1.0, max(last, ready / anatomy.backward_s))
        gradients.append(Gradient(name, elements, half, last))
    return Workload(
        model=model,
        gradients=tuple(gradients),
        forward=Affine(fixed * share, per_image * share),
        backward=Affine(fixed * (1 - share), per_image * (1 - share)),
        update_s=update,
        spread=max(0.02, spread),
        source=source,
        image_size=image_size,
        batches=tuple(batch for batch, _ in points),
        device=device,
    )


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Fits a line with non-negative intercept and slope; a single point gives a line through 0.

    Returns:
        Intercept, slope and relative residual.
    """
    batches = np.array([batch for batch, _ in points], dtype=np.float64)
    seconds = np.array([step for _, step in points])
    if len(points) == 1:
        return 0.0, float(seconds[0] / batches[0]), 0.1
    # Weights of 1/t minimize relative errors.
    design = np.stack([np.ones_like(batches), batches], axis=1) / seconds[:, None]
    (fixed, slope), *_ = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)
    if fixed < 0 or slope < 0:
        fixed, slope = 0.0, float(np.mean(seconds / batches))
    away = (fixed + slope * batches) / seconds - 1
    return float(fixed), float(slope), float(math.sqrt(float(np.mean(away**2))))
