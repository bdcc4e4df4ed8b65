"""Sends the metrics of a run to experiment trackers: CSV, TensorBoard, Weights & Biases, MLflow.

Trackers receive every number that is written to `metrics.jsonl`. Training imports this package only
if `run.trackers` names a tracker. A program adds its own tracker with `register`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, nearest
from paceline.trackers.clients import CsvTracker, MlflowTracker, TensorBoardTracker, WandbTracker
from paceline.trackers.thread import Tracker, TrackerThread

# Creates a tracker from the run folder, the first step of this process and the settings of the run.
Make = Callable[[Path, int, Mapping[str, Any]], Tracker]


# The function of each tracker, and the package that it needs.
_REGISTRY: dict[str, tuple[Make, str]] = {}


def register(name: str, make: Make, package: str = "") -> None:
    """Makes a tracker available under a name.

    Args:
        name: The name that selects the tracker in `run.trackers`.
        make: Creates the tracker from the run folder, the first step of this process and the settings.
        package: The Python package that must be installed for this tracker; "" if it needs none.
    """
    _REGISTRY[name] = make, package


register("csv", lambda folder, first_step, _: CsvTracker(folder, first_step))
register(
    "tensorboard",
    lambda folder, first_step, _: TensorBoardTracker(folder, first_step),
    "tensorboard",
)
register("wandb", lambda folder, _, settings: WandbTracker(folder, settings), "wandb")
register("mlflow", lambda folder, _, settings: MlflowTracker(folder, settings), "mlflow")


def check_trackers(names: Iterable[str]) -> None:
    """Raises ConfigError if a tracker is not registered or if its package is not installed."""
    for name in names:
        if name not in _REGISTRY:
            raise ConfigError("run.trackers", name, "unknown", nearest(name, _REGISTRY))
        _, package = _REGISTRY[name]
        if package and importlib.util.find_spec(package) is None:
            raise ConfigError(
                "run.trackers", name, f"{package} is not installed",
                f"pip install 'paceline[{name}]', or leave it out",
            )  # fmt: skip


def open_trackers(
    names: Iterable[str], folder: Path, first_step: int, settings: Mapping[str, Any],
    note: Callable[[str], None],
) -> list[TrackerThread]:  # fmt: skip
    """Starts each tracker on its own thread and returns the observers that pass events to them.

    Args:
        names: The names of the trackers; repeated names are opened once.
        folder: The run folder, in which trackers write files.
        first_step: The step at which this process starts, which is above 0 in a resumed run.
        settings: The settings of the run, which some trackers store with the run.
        note: Is called with one line of text if a tracker fails.
    """

    def start(name: str) -> TrackerThread:
        make, _ = _REGISTRY[name]
        return TrackerThread(name, lambda: make(folder, first_step, settings), note)

    return [start(name) for name in dict.fromkeys(names)]
