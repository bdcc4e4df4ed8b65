"""Experiment trackers: CSV, TensorBoard, Weights & Biases, MLflow.

They receive every number of `metrics.jsonl`. The training loads this package if `run.trackers` names a
tracker. A program adds one with `register`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError, nearest
from paceline.trackers.clients import CsvTracker, MlflowTracker, TensorBoardTracker, WandbTracker
from paceline.trackers.thread import Tracker, TrackerThread

# From the run folder, the first step of this process and the settings of the run.
Make = Callable[[Path, int, Mapping[str, Any]], Tracker]


class _Registered(NamedTuple):
    make: Make
    package: str


_REGISTRY: dict[str, _Registered] = {}


def register(name: str, make: Make, package: str = "") -> None:
    """Adds a tracker.

    Args:
        name: The name in `run.trackers`.
        make: Creates the tracker from the run folder, the first step of this process and the settings.
        package: The package that the tracker needs, or "".
    """
    _REGISTRY[name] = _Registered(make, package)


register("csv", lambda folder, first_step, _: CsvTracker(folder, first_step))
register(
    "tensorboard",
    lambda folder, first_step, _: TensorBoardTracker(folder, first_step),
    "tensorboard",
)
register("wandb", lambda folder, _, settings: WandbTracker(folder, settings), "wandb")
register("mlflow", lambda folder, _, settings: MlflowTracker(folder, settings), "mlflow")


def check_trackers(names: Iterable[str]) -> None:
    """Raises ConfigError for a name that is unknown or whose package is not installed."""
    for name in names:
        if name not in _REGISTRY:
            raise ConfigError("run.trackers", name, "unknown", nearest(name, _REGISTRY))
        package = _REGISTRY[name].package
        if package and importlib.util.find_spec(package) is None:
            raise ConfigError(
                "run.trackers", name, f"{package} is not installed",
                f"pip install 'paceline[{name}]', or leave it out",
            )  # fmt: skip


def open_trackers(
    names: Iterable[str], folder: Path, first_step: int, settings: Mapping[str, Any],
    note: Callable[[str], None],
) -> list[TrackerThread]:  # fmt: skip
    """Returns an observer for each tracker of the run.

    Args:
        names: The names of the trackers.
        folder: The run folder.
        first_step: The first step of this process.
        settings: The settings of the run.
        note: Receives one line if a tracker fails.
    """

    def start(name: str) -> TrackerThread:
        make = _REGISTRY[name].make
        return TrackerThread(name, lambda: make(folder, first_step, settings), note)

    return [start(name) for name in dict.fromkeys(names)]
