"""`Callback`: code of the user that runs at the events of a training run; `EarlyStopping` and `RangeTest`
are two.

Callbacks run on every rank, in the order given. The numbers of an `EvalEvent` and the loss of a
`StepEvent` are equal on all ranks. An exception in a callback on any rank ends the run on all ranks,
after a checkpoint, with one line that names the callback.

`RangeTest` is the learning-rate range test (Smith 2017): in a short run whose rate grows with every step
it keeps rate and loss of each step and ends the run where the loss explodes. `RangeResult` says which
rates the losses suggest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from paceline.core.errors import ConfigError, PacelineError, RunError
from paceline.core.events import (
    CheckpointEvent,
    EvalEvent,
    Event,
    MetricEvent,
    NoteEvent,
    StartEvent,
    StepEvent,
    StopEvent,
)

if TYPE_CHECKING:
    from paceline.train.training import Training


class RunControl:
    """What a callback may ask of the run, and change in it."""

    def __init__(self, training: Training) -> None:
        self._training = training

    @property
    def rank(self) -> int:
        return self._training.group.rank

    @property
    def world_size(self) -> int:
        return self._training.group.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self._training.is_main

    @property
    def folder(self) -> Path:
        """The run folder; other ranks may run on nodes that do not share it."""
        return self._training.folder.path

    @property
    def step(self) -> int:
        """Completed steps."""
        return self._training.progress.step

    @property
    def model(self) -> nn.Module:
        """The model as it computes, possibly in half precision. Do not change its parameters."""
        return self._training.model

    def stop(self, reason: str) -> None:
        """Ends the run on all ranks after the next step, with a checkpoint. One rank's request is
        enough."""
        self.note(f"stop requested: {reason}")
        self._training.stop.requested = True

    def save(self) -> None:
        """Saves a checkpoint after the next step. One rank's request is enough."""
        self._training.stop.save_requested = True

    def log(self, **values: float) -> None:
        """Records metrics of this rank in `metrics.jsonl`; pages, `/metrics` and trackers show them."""
        numbers = {name: float(value) for name, value in values.items()}
        self._training.emit(MetricEvent(step=self.step, values=numbers))

    def note(self, text: str) -> None:
        """Shows a line, and records it."""
        self._training.emit(NoteEvent(text))


class Callback:
    """Override what you need.

    Example:
        class LogRate(pl.Callback):
            def on_step(self, run, event):
                if event.step % 100 == 0:
                    run.log(rate=event.lr)

        pl.Trainer(callbacks=[LogRate()]).fit()
    """

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: numbers, texts, lists, dictionaries and tensors. It is kept in the
        checkpoint, as rank 0 has it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called before `on_start` of a resumed run, with what `state_dict` returned."""

    def on_start(self, run: RunControl, event: StartEvent) -> None:
        """Before the first step of this process."""

    def on_step(self, run: RunControl, event: StepEvent) -> None:
        """After each step, when its loss is known; on a GPU the next step may already run."""

    def on_evaluation(self, run: RunControl, event: EvalEvent) -> None:
        """After each evaluation."""

    def on_checkpoint(self, run: RunControl, event: CheckpointEvent) -> None:
        """After a checkpoint was written, at the step that follows; on rank 0 only."""

    def on_stop(self, run: RunControl, event: StopEvent) -> None:
        """After the last step of this process."""


class CallbackRunner:
    """Passes events to callbacks. An exception is kept in `error` and asks the run to stop."""

    def __init__(self, callbacks: Sequence[Callback], training: Training) -> None:
        self._callbacks = callbacks
        self._training = training
        self._control = RunControl(training)
        self.error: PacelineError | None = None

    def on_event(self, event: Event) -> None:
        for callback in self._callbacks:
            hook = _hook(callback, event)
            if hook is None or self.error is not None:
                continue
            try:
                hook(self._control, event)
            except Exception as error:  # noqa: BLE001  (the user's code may raise anything)
                self._fail(callback, hook.__name__, error)

    def _fail(self, callback: Callback, hook: str, error: Exception) -> None:
        reason = str(error).splitlines()[0] if str(error) else ""
        name = f"{type(callback).__name__}.{hook}"
        saved = "; the run was saved and continues with resume='auto'"
        self.error = RunError(
            f"the callback {name} failed: {type(error).__name__}{reason and ': '}{reason}",
            f"fix it, or leave it out{'' if hook == 'on_start' else saved}",
        )
        self.error.__cause__ = error
        self._training.stop.requested = True

    def state(self) -> dict[str, Any]:
        """Of all callbacks, by class and place. A state that a checkpoint cannot hold is an error of the
        callback."""
        found = {}
        for number, callback in enumerate(self._callbacks):
            try:
                state = callback.state_dict()
                _check_plain(state)
            except Exception as error:  # noqa: BLE001  (the user's code may raise anything)
                if self.error is None:
                    self._fail(callback, "state_dict", error)
                continue
            if state:
                found[self._key(number, callback)] = state
        return found

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Callbacks that the checkpoint does not know start afresh."""
        for number, callback in enumerate(self._callbacks):
            if (key := self._key(number, callback)) in saved:
                callback.load_state_dict(dict(saved[key]))

    @staticmethod
    def _key(number: int, callback: Callback) -> str:
        return f"{number}:{type(callback).__name__}"

    def close(self) -> None:
        """Nothing to clean up."""


def _check_plain(value: object) -> None:
    """A checkpoint is read without executing code, so it holds plain values and tensors only."""
    if isinstance(value, dict):
        _check_plain(list(value))
        _check_plain(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            _check_plain(item)
    elif type(value) not in (int, float, bool, str, bytes, type(None), Tensor):
        raise TypeError(f"a {type(value).__name__}, which a checkpoint does not hold")


def _hook(callback: Callback, event: Event) -> Callable[[RunControl, Any], None] | None:
    match event:
        case StartEvent():
            return callback.on_start
        case StepEvent():
            return callback.on_step
        case EvalEvent():
            return callback.on_evaluation
        case CheckpointEvent():
            return callback.on_checkpoint
        case StopEvent():
            return callback.on_stop
    return None


class EarlyStopping(Callback):
    """Stops when `metric` ("top1", "top5" or "loss") has not improved by more than `min_delta` for
    `patience` evaluations in a row.

    Example:
        pl.Trainer(epochs=90, callbacks=[pl.EarlyStopping(patience=5)]).fit()
    """

    def __init__(self, metric: str = "top1", patience: int = 5, min_delta: float = 0.0) -> None:
        if metric not in ("top1", "top5", "loss"):
            raise ConfigError("EarlyStopping.metric", metric, "unknown", "use top1, top5 or loss")
        if patience < 1:
            raise ConfigError("EarlyStopping.patience", patience, "must be at least 1")
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.best = float("-inf")
        self.waited = 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = float(state["best"]), int(state["waited"])

    def on_start(self, run: RunControl, event: StartEvent) -> None:
        if event.resumed_from is None:
            self.best, self.waited = float("-inf"), 0

    def on_evaluation(self, run: RunControl, event: EvalEvent) -> None:
        value = float(getattr(event, self.metric)) * (-1 if self.metric == "loss" else 1)
        if value > self.best + self.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            run.stop(f"{self.metric} has not improved in {self.waited} evaluations")


# Weight of the past in the smoothed loss; losses of single steps are too noisy for a slope.
SMOOTHING = 0.9
# The run ends where the smoothed loss is this many times the lowest one.
EXPLODED = 4.0
# Before, the smoothed loss is that of few steps.
_LEAST_STEPS = 10
# A fall of the smoothed loss counts from its highest value after these first steps, of which it is hardly
# an average yet.
_SETTLING_STEPS = 4
# A fall by less than this many standard deviations of the losses is noise: that of losses without any
# trend is as large in at most two tests of a hundred, of 10 steps as of 1,000.
_CLEAR_FALL = 1.85
# The share of second differences that counts, the smallest ones, and their mean for normal numbers, in
# their standard deviations: 0.5586 √6.
_COUNTED_BENDS = 0.8
_BEND_OF_NOISE = 1.368


@dataclass(frozen=True)
class RangeResult:
    """`rates` and `losses` of the finite steps, and the smoothed losses.

    `suggested` is the rate at which the smoothed loss falls fastest with the logarithm of the rate, None
    where its fall is lost in noise; `largest` the one at its lowest point, an upper bound for the peak of
    a cycle. `fall` is in standard deviations of the losses from step to step.
    """

    rates: Sequence[float]
    losses: Sequence[float]
    smoothed: Sequence[float]
    suggested: float | None
    largest: float
    exploded: bool
    fall: float

    @classmethod
    def of(cls, rates: Sequence[float], losses: Sequence[float], exploded: bool) -> RangeResult:
        """RunError where there are too few losses to say anything."""
        if len(rates) < _LEAST_STEPS:
            raise RunError(
                f"only {len(rates)} steps had a finite loss", "start with a lower --from"
            )
        smoothed = smooth(losses)
        lowest = min(range(len(smoothed)), key=smoothed.__getitem__)
        # A slope over several steps, up to the lowest point; where there is none, the first rate.
        reach = max(2, len(rates) // 20)
        slopes = {
            n: (smoothed[n + reach] - smoothed[n - reach])
            / math.log(rates[n + reach] / rates[n - reach])
            for n in range(reach, min(lowest + 1, len(rates) - reach))
        }
        steepest = min(slopes, key=slopes.__getitem__, default=0)
        highest = max(smoothed[_SETTLING_STEPS : lowest + 1], default=smoothed[lowest])
        # Equal losses have a smoothed loss that differs by rounding.
        noise = max(_noise(losses[: max(lowest + 1, _LEAST_STEPS)]), 1e-9 * abs(highest)) or 1.0
        fall = (highest - smoothed[lowest]) / noise
        suggested = rates[steepest] if fall >= _CLEAR_FALL else None
        return cls(rates, losses, smoothed, suggested, rates[lowest], exploded, fall)

    def to_table(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "suggested_lr": self.suggested,
            "fall": self.fall,
            "largest_lr": self.largest,
            "exploded": self.exploded,
            "lr": list(self.rates),
            "loss": list(self.losses),
            "smoothed_loss": list(self.smoothed),
        }


def _noise(losses: Sequence[float]) -> float:
    """The standard deviation around a trend. Second differences have nothing of a steady descent, and the
    smaller ones nothing of an explosion."""
    bends = sorted(abs(a - 2 * b + c) for (a, b), (_, c) in pairwise(pairwise(losses)))
    return fmean(bends[: int(_COUNTED_BENDS * len(bends))]) / _BEND_OF_NOISE


def smooth(losses: Sequence[float]) -> list[float]:
    """The exponential moving average, without the bias of its first values."""
    found, average = [], 0.0
    for n, loss in enumerate(losses, start=1):
        average = SMOOTHING * average + (1 - SMOOTHING) * loss
        found.append(average / (1 - SMOOTHING**n))
    return found


@dataclass
class RangeTest(Callback):
    """Ends the run after `steps` steps, or where the loss explodes or is not finite."""

    steps: int
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    exploded: bool = False

    def on_step(self, run: RunControl, event: StepEvent) -> None:
        if self.exploded or len(self.rates) == self.steps:
            return  # a step that was already under way: there may be several
        if not math.isfinite(event.loss):
            self.exploded = True
            run.stop("the loss is not finite")
            return
        self.rates.append(event.lr)
        self.losses.append(event.loss)
        smoothed = smooth(self.losses)
        if len(smoothed) > _LEAST_STEPS and smoothed[-1] > EXPLODED * min(smoothed):
            self.exploded = True
            run.stop(f"the loss is {EXPLODED:g} times its lowest value")
        elif event.step == self.steps - 1:
            run.stop("the last rate is reached")  # after the next step

    def result(self) -> RangeResult:
        """What was found."""
        return RangeResult.of(self.rates, self.losses, self.exploded)
