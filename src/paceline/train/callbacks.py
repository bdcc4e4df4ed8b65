"""`Callback`, the base class of user code that runs at the events of a run, and `EarlyStopping`.

Callbacks run on every rank, in the given order. The results in an `EvalEvent` and the loss in a
`StepEvent` are equal on all ranks. An exception in a callback on any rank ends the run on all ranks:
Paceline saves a checkpoint and raises an error of one line that names the callback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

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
from paceline.core.imports import first_line
from paceline.optim.state import plain

if TYPE_CHECKING:
    from paceline.train.training import Training


class RunControl:
    """Gives callbacks access to the run: its state, and requests to stop, save or log.

    Example:
        class StopAtLoss(pl.Callback):
            def on_step(self, run: pl.RunControl, event: pl.StepEvent) -> None:
                if event.loss < 0.1:
                    run.stop("the loss is small enough")
    """

    def __init__(self, training: Training) -> None:
        self._training = training

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._training.group.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._training.group.world_size

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes files."""
        return self._training.is_main

    @property
    def folder(self) -> Path:
        """The run folder of rank 0. Other nodes might not have access to this folder."""
        return self._training.folder.path

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self._training.progress.step

    @property
    def model(self) -> nn.Module:
        """The model, possibly in half precision. Do not change its parameters."""
        return self._training.model

    def stop(self, reason: str) -> None:
        """Ends the run on all ranks after the next step, with a checkpoint.

        A request from one rank is enough.

        Args:
            reason: The text that is displayed and recorded.
        """
        self.note(f"stop requested: {reason}")
        self._training.stop.requested = True

    def save(self) -> None:
        """Saves a checkpoint on all ranks after the next step. A request from one rank is enough."""
        self._training.stop.save_requested = True

    def log(self, **values: float) -> None:
        """Records metrics of this rank in `metrics.jsonl`, for reports, `/metrics` and trackers."""
        numbers = {name: float(value) for name, value in values.items()}
        self._training.emit(MetricEvent(step=self.step, values=numbers))

    def note(self, text: str) -> None:
        """Displays a line of text and adds it to the records."""
        self._training.emit(NoteEvent(text))


class Callback:
    """The base class of callbacks: override the methods that you need.

    Example:
        class LogRate(pl.Callback):
            def on_step(self, run, event):
                if event.step % 100 == 0:
                    run.log(rate=event.lr)

        pl.Trainer(callbacks=[LogRate()]).fit()
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs.

        The state can contain numbers, texts, lists, dictionaries and tensors. A checkpoint contains the
        state of rank 0.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` has returned. Runs before `on_start` of a resumed run."""

    def on_start(self, run: RunControl, event: StartEvent) -> None:
        """Runs before the first step of this process."""

    def on_step(self, run: RunControl, event: StepEvent) -> None:
        """Runs once the loss of a step is known. On a GPU the next step may already be running."""

    def on_evaluation(self, run: RunControl, event: EvalEvent) -> None:
        """Runs after each evaluation."""

    def on_checkpoint(self, run: RunControl, event: CheckpointEvent) -> None:
        """Runs on rank 0 at the step after a checkpoint was written."""

    def on_stop(self, run: RunControl, event: StopEvent) -> None:
        """Runs after the last step of this process."""


_HOOKS: dict[type[Event], str] = {
    StartEvent: "on_start",
    StepEvent: "on_step",
    EvalEvent: "on_evaluation",
    CheckpointEvent: "on_checkpoint",
    StopEvent: "on_stop",
}


class CallbackRunner:
    """Passes the events of a run to its callbacks.

    If a callback raises an exception, stores the exception in `error` and asks the run to stop.
    """

    def __init__(self, callbacks: Sequence[Callback], training: Training) -> None:
        self._callbacks = callbacks
        self._training = training
        self._control = RunControl(training)
        self.error: PacelineError | None = None

    def on_event(self, event: Event) -> None:
        """Calls each callback's method for the event, until a callback fails."""
        hook = _HOOKS.get(type(event))
        for callback in self._callbacks if hook else ():
            if self.error is not None:
                return
            try:
                getattr(callback, str(hook))(self._control, event)
            except Exception as error:  # noqa: BLE001  (the user's code may raise anything)
                self._fail(callback, str(hook), error)

    def _fail(self, callback: Callback, hook: str, error: Exception) -> None:
        saved = "; the run was saved and continues with resume='auto'"
        self.error = RunError(
            f"the callback {type(callback).__name__}.{hook} failed: {first_line(error)}",
            f"fix it, or leave it out{'' if hook == 'on_start' else saved}",
        )
        self.error.__cause__ = error
        self._training.stop.requested = True

    def state(self) -> dict[str, Any]:
        """Returns the states of all callbacks, by position and class name, for a checkpoint.

        An error of a callback is recorded if a checkpoint cannot contain the state that it returns.
        """
        states = {}
        for number, callback in enumerate(self._callbacks):
            try:
                state = plain(callback.state_dict(), "its result")
            except Exception as error:  # noqa: BLE001  (the user's code may raise anything)
                if self.error is None:
                    self._fail(callback, "state_dict", error)
                continue
            if state:
                states[f"{number}:{type(callback).__name__}"] = state
        return states

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restores the states of callbacks. Callbacks without a saved state keep their initial state."""
        for number, callback in enumerate(self._callbacks):
            if (key := f"{number}:{type(callback).__name__}") in saved:
                callback.load_state_dict(dict(saved[key]))

    def close(self) -> None:
        """Does nothing."""


class EarlyStopping(Callback):
    """Stops the run when a metric does not improve any more.

    Example:
        pl.Trainer(epochs=90, callbacks=[pl.EarlyStopping(patience=5)]).fit()
    """

    def __init__(self, metric: str = "top1", patience: int = 5, min_delta: float = 0.0) -> None:
        """Creates the callback.

        Args:
            metric: `top1`, `top5` or `loss`.
            patience: Number of consecutive evaluations without improvement after which the run
                stops.
            min_delta: Smallest change of the metric that is treated as an improvement.

        Raises:
            ConfigError: If an argument is invalid.
        """
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
