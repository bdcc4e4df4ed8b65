"""The simulator: many iterations of many ranks, event by event.

In: the times of one iteration (input, copy, each layer's forward and backward, each buffer's exchange,
update), how ranks differ, and what may overlap. Out: for every iteration its length, and which part of it
was exposed communication and waiting for input.

Every rank has three resources that do one thing at a time: its loader, its GPU, and the channel that all
ranks share, on which a buffer starts when it is ready on the last rank. Ranks are the elements of NumPy
arrays, so that 65,536 of them take seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError
from paceline.plan.overlap import StepTimes

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Jitter:
    """Relative standard deviations: of ranks among one another, of a rank's steps, of its input."""

    ranks: float = 0.0
    steps: float = 0.0
    input: float = 0.0

    @property
    def is_none(self) -> bool:
        return self.ranks == self.steps == self.input == 0


@dataclass(frozen=True)
class Options:
    """`prefetch` is how many batches may lie ready beyond the one in use; 0 reads after the step.
    `layers` splits forward and backward into as many events, which changes nothing but the count."""

    overlap: bool = True
    prefetch: int = 1
    iterations: int = 20
    layers: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Simulated:
    """Seconds, one value an iteration. `slowest` is the rank that the exchanges waited for."""

    step_s: Floats
    exposed_s: Floats
    stall_s: Floats
    slowest: npt.NDArray[np.int64]

    @property
    def settled_s(self) -> float:
        """The mean step once the pipeline is full: the first quarter is left out."""
        return float(self.step_s[len(self.step_s) // 4 :].mean())


def simulate(
    times: StepTimes, ranks: int = 1, jitter: Jitter | None = None, options: Options | None = None
) -> Simulated:
    jitter, options = jitter or Jitter(), options or Options()
    if ranks < 1 or options.iterations < 1 or options.layers < 1 or options.prefetch < 0:
        raise ConfigError("ranks, iterations, layers", None, "must be at least 1")
    draw = _Draw(ranks, jitter, options.seed)
    # Equal ranks stay equal: one stands for all.
    width = 1 if jitter.is_none else ranks
    loader_free = np.zeros(width)  # when the loader has put its last batch on the device
    taken: list[Floats] = []  # when the GPU began with each batch, which frees its place
    end = np.zeros(width)
    rows = []
    for number in range(options.iterations):
        compute, reading = draw.factors(width)
        if options.prefetch == 0:
            may_read = end
        else:
            place = number - options.prefetch
            may_read = taken[place] if place >= 0 else np.zeros(width)
        loader_free = np.maximum(loader_free, may_read) + (times.input_s + times.copy_s) * reading
        start = np.maximum(end, loader_free)
        taken.append(start)
        gpu = _run_layers(start, times.forward_s, compute, options.layers)
        backward_starts = gpu
        gpu = _run_layers(gpu, times.backward_s, compute, options.layers)
        last_rank = int(np.argmax(gpu))
        free = 0.0
        for ready, cost in zip(times.ready_s, times.cost_s, strict=True):
            there = backward_starts + ready * compute if options.overlap else gpu
            free = max(free, float(there.max())) + cost
        done = np.maximum(gpu, free)
        exposed = float((done - gpu).min())
        slowed = times.hidden_cost * max(0.0, sum(times.cost_s) - exposed)
        before, end = end, done + slowed + times.update_s * compute
        rows.append((float(end.max() - before.max()), exposed,
                     float((start - before).max()), last_rank))  # fmt: skip
    step, exposed_s, stall, slowest = zip(*rows, strict=True)
    return Simulated(
        np.array(step), np.array(exposed_s), np.array(stall), np.array(slowest, dtype=np.int64)
    )


def _run_layers(start: Floats, seconds: float, factor: Floats, layers: int) -> Floats:
    for _ in range(layers):
        start = start + seconds / layers * factor
    return start


class _Draw:
    """Factors on the times, never below half."""

    def __init__(self, ranks: int, jitter: Jitter, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._jitter = jitter
        self._own = np.maximum(1 + jitter.ranks * self._random.standard_normal(ranks), 0.5)

    def factors(self, width: int) -> tuple[Floats, Floats]:
        """Of compute and of input, for one iteration."""
        if self._jitter.is_none:
            return np.ones(width), np.ones(width)
        compute = self._own * self._noise(width, self._jitter.steps)
        return compute, self._noise(width, self._jitter.input)

    def _noise(self, width: int, spread: float) -> Floats:
        if spread == 0:
            return np.ones(width)
        return np.maximum(1 + spread * self._random.standard_normal(width), 0.5)
