"""Whole small runs that are watched, stopped and looked into, for the tests of train."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from paceline.core.events import Event, StepEvent
from paceline.train import Checkpoint, RunOutcome, run_training
from small_runs import Silent, small_config

EVERY_STEP: dict[str, Any] = {"checkpoint__interval_steps": 1, "checkpoint__keep": 99}


class StopAt(Silent):
    """Sends SIGTERM to this process after a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def on_event(self, event: Event) -> None:
        super().on_event(event)
        if isinstance(event, StepEvent) and event.step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


def stop_after(step: int, output: Path, **values: Any) -> RunOutcome:
    display = StopAt(step)
    return run_training(small_config(output, **values), lambda: display)


def watched(output: Path, **values: Any) -> tuple[RunOutcome, list[Event]]:
    display = Silent()
    return run_training(small_config(output, **values), lambda: display), display.events


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*.pt"))


def last(folder: Path) -> Checkpoint:
    return Checkpoint.read(newest(folder))
