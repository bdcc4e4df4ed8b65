"""Whole small runs that are watched, stopped and looked into, for the tests of train."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from paceline.core.events import Event, StepEvent
from paceline.train import Checkpoint, RunOutcome, run_training
from paceline.train.components import Components
from paceline.train.run_state import Progress
from small_runs import Silent, small_config

EVERY_STEP: dict[str, Any] = {"checkpoint__interval_steps": 1, "checkpoint__keep": 99}


def stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class AtStep(Silent):
    """Acts after a step; by default, sends SIGTERM to this process."""

    def __init__(self, step: int, act: Callable[[], object] = stop_this_process) -> None:
        super().__init__()
        self._step, self._act = step, act

    def on_event(self, event: Event) -> None:
        super().on_event(event)
        if isinstance(event, StepEvent) and event.step == self._step:
            self._act()


def stop_after(step: int, output: Path, **values: Any) -> RunOutcome:
    display = AtStep(step)
    return run_training(small_config(output, **values), lambda: display)


def watched(
    output: Path, components: Components | None = None, display: Silent | None = None, **values: Any
) -> tuple[RunOutcome, list[Event]]:
    shown = display or Silent()
    outcome = run_training(small_config(output, **values), lambda: shown, components=components)
    return outcome, shown.events


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*.pt"))


def last(folder: Path) -> Checkpoint:
    return Checkpoint.read(newest(folder))


def made_checkpoint(**changes: Any) -> Checkpoint:
    """A checkpoint of step 5, with something in every part."""
    parts: dict[str, Any] = {
        "progress": asdict(Progress(step=5, top1=12.5, resumes=[3])),
        "config": {"run": {"seed": 0}},
        "world_size": 2,
        "threads": 1,
        "plan": {"buffer": [{"tensors": ["w"], "algorithm": "native", "wire": "auto"}]},
        "model": {"w": torch.arange(600.0).reshape(2, 3, 10, 10), "b": torch.zeros(0)},
        "batch_norm": {
            "rows": torch.arange(16.0).reshape(2, 2, 4), "names": ["bn"], "widths": [4],
            "tracked": torch.tensor([[5], [3]]),
        },
        "optimizer": {"state": {0: {"momentum_buffer": torch.ones(6)}}, "param_groups": [{"lr": 1}]},
        "precision": {"scale": 1024.0, "quiet_steps": 7.0},
        "sampler": {"position": 80},
        "schedule": {"peak_lr": 0.1},
        "rng": {"seed": 0},
        "classes": ["ant", "bee"],
        "versions": {"torch": "2"},
    }  # fmt: skip
    return Checkpoint(**parts | changes)
