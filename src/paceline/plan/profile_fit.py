"""From measured steps to a `Workload`.

In: step times at several batches, and one step taken apart. Out: the workload: affine in the batch, split
into forward, backward and update as the step that was taken apart. A ConfigError where larger batches
were not slower, since no line through such times means anything.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.errors import ConfigError
from paceline.plan.workload import Affine, Gradient, Workload


@dataclass(frozen=True)
class StepAnatomy:
    """Seconds of the parts of one step, and for each gradient when it was ready, from the start of the
    backward pass, in order of readiness."""

    forward_s: float
    backward_s: float
    update_s: float
    gradients: tuple[tuple[str, int, bool, float], ...]


def fit_workload(
    model: str, steps: Sequence[tuple[int, float]], anatomy: StepAnatomy, source: str
) -> Workload:
    """`steps` are (batch, seconds)."""
    points = sorted(steps)
    for (small, faster), (large, slower) in itertools.pairwise(points):
        if large > small and slower <= faster:
            raise ConfigError(
                "--batch-size", f"{small}, {large}",
                f"a step of {large} took {1e3 * slower:.3g} ms, one of {small} {1e3 * faster:.3g}",
                "profile on a quiet machine, or with batches further apart",
            )  # fmt: skip
    # The update does not depend on the batch; what it took stays out of the line.
    update = min(anatomy.update_s, 0.9 * points[0][1])
    fixed, per_image, spread = _line([(batch, step - update) for batch, step in points])
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
    )


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Intercept, slope (neither negative) and relative residual; through the origin for one point."""
    batches = np.array([batch for batch, _ in points], dtype=np.float64)
    seconds = np.array([step for _, step in points])
    if len(points) == 1:
        return 0.0, float(seconds[0] / batches[0]), 0.1
    # Weighted by 1/t: every batch counts by its relative error.
    design = np.stack([np.ones_like(batches), batches], axis=1) / seconds[:, None]
    (fixed, slope), *_ = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)
    if fixed < 0 or slope < 0:
        fixed, slope = 0.0, float(np.mean(seconds / batches))
    away = (fixed + slope * batches) / seconds - 1
    return float(fixed), float(slope), float(math.sqrt(float(np.mean(away**2))))
