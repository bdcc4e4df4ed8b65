"""`Callback`: code of the user that runs at the events of a training run; `EarlyStopping` is one.

Callbacks run on every rank, in the order given. The numbers of an `EvalEvent` and the loss of a
`StepEvent` are equal on all ranks. An exception in a callback on any rank ends the run on all ranks,
after a checkpoint, with one line that names the callback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
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


_HOOKS: dict[type[Event], str] = {
    StartEvent: "on_start",
    StepEvent: "on_step",
    EvalEvent: "on_evaluation",
    CheckpointEvent: "on_checkpoint",
    StopEvent: "on_stop",
}


class CallbackRunner:
    """Passes events to callbacks. An exception is kept in `error` and asks the run to stop."""

    def __init__(self, callbacks: Sequence[Callback], training: Training) -> None:
        self._callbacks = callbacks
        self._training = training
        self._control = RunControl(training)
        self.error: PacelineError | None = None

    def on_event(self, event: Event) -> None:
        for callback in self._callbacks:
            hook = _HOOKS.get(type(event))
            if hook is None or self.error is not None:
                continue
            try:
                getattr(callback, hook)(self._control, event)
            except Exception as error:  # noqa: BLE001  (the user's code may raise anything)
                self._fail(callback, hook, error)

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
