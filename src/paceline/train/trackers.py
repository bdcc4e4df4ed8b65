"""Experiment trackers: CSV, TensorBoard, Weights & Biases, MLflow. They receive every number of
`metrics.jsonl`.

A tracker runs on a thread behind a queue: its server may be slow, offline or full. Whatever happens to
it, training goes on, and one line says so.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from paceline.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.core.events import (
    CheckpointEvent,
    CorruptEvent,
    EvalEvent,
    Event,
    MetricEvent,
    RanksEvent,
    StepEvent,
)
from paceline.core.files import whole_file
from paceline.core.untrusted import one_line

# Events that wait for a slow tracker; later ones are dropped.
_QUEUE = 20_000
# How long the end of a run waits for a tracker.
_CLOSE_S = 20.0
# The package that a tracker needs.
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
_PREFIXES: dict[type[Event], str] = {
    StepEvent: "train", EvalEvent: "val", CheckpointEvent: "checkpoint", RanksEvent: "ranks",
    MetricEvent: "metric",
}  # fmt: skip


def scalars(event: Event) -> dict[str, float]:
    """All numbers of an event by name: `train/loss`, `train/input_stall_causes/decode`, `val/top1`,
    `ranks/step_s/max`, `metric/NAME`. Those that are not finite are left out."""
    prefix = _PREFIXES.get(type(event))
    if prefix is None:
        return {}
    found: dict[str, float] = {}
    for field in fields(event):
        value = getattr(event, field.name)
        if field.name == "step":
            continue
        if isinstance(value, dict):
            # The values of a callback are the event itself.
            inner = prefix if field.name == "values" else f"{prefix}/{field.name}"
            found |= {f"{inner}/{name}": float(number) for name, number in value.items()}
        elif isinstance(value, int | float):
            found[f"{prefix}/{field.name}"] = float(value)
    return {name: number for name, number in found.items() if math.isfinite(number)}


class Tracker(Protocol):
    """Called from one thread. May raise anything, at any time."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class CsvTracker:
    """`metrics.csv` has a column for each number of steps and evaluations, and a row for each of these;
    `metrics-more.csv` has other numbers as step, name, value."""

    def __init__(self, folder: Path, first_step: int) -> None:
        causes = [f"input_stall_causes/{name}" for name in ("read", "decode", "augment", "copy")]
        left_out = ("step", "input_stall_causes")
        of_steps = [field.name for field in fields(StepEvent) if field.name not in left_out]
        of_evaluations = [field.name for field in fields(EvalEvent) if field.name != "step"]
        self._columns = [
            "step",
            *(f"train/{name}" for name in (*of_steps, *causes)),
            *(f"val/{name}" for name in of_evaluations),
        ]
        self._wide = _opened(folder / "metrics.csv", self._columns, first_step)
        self._long = _opened(folder / "metrics-more.csv", ["step", "name", "value"], first_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        known = {name: value for name, value in values.items() if name in self._columns}
        if known:
            row = [step, *(known.get(name, "") for name in self._columns[1:])]
            csv.writer(self._wide).writerow(row)
            self._wide.flush()
        more = [(step, name, value) for name, value in values.items() if name not in known]
        if more:
            csv.writer(self._long).writerows(more)
            self._long.flush()

    def close(self) -> None:
        self._wide.close()
        self._long.close()


def _opened(path: Path, columns: list[str], first_step: int) -> Any:
    """Appends to the rows up to `first_step`: a resumed run repeats the later ones."""
    kept: list[list[str]] = []
    if first_step and path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if row and row[0].isdigit()]
        kept = [row for row in rows if int(row[0]) <= first_step and len(row) == len(columns)]
    with whole_file(path) as raw:
        lines = [columns, *kept]
        raw.write("".join(f"{_csv_line(line)}\r\n" for line in lines).encode())
    return path.open("a", newline="", encoding="utf-8")


def _csv_line(cells: list[str]) -> str:
    quoted = (
        '"' + cell.replace('"', '""') + '"' if set(cell) & set('",\r\n') else cell for cell in cells
    )
    return ",".join(quoted)


class TensorBoardTracker:
    """Event files in `RUN/tensorboard`."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hides steps that a killed process logged after its last checkpoint, whose own step stays.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases, with the settings as its configuration. `WANDB_MODE=offline` keeps it in
    `RUN/wandb`, `WANDB_PROJECT` names its project.

    The step is a value, and the x-axis of all others: W&B drops what is logged for an earlier step of its
    own counter, such as a checkpoint that was written in the background.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        offline = os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled")
        if not offline and not wandb.api.api_key:
            # It would ask for one at the terminal.
            raise RuntimeError("no API key; run `wandb login`, or set WANDB_MODE=offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "paceline"),
            name=folder.resolve().name,
            # The same after a resume.
            id=hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16],
            resume="allow",
            dir=str(folder),
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True, x_disable_meta=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """A run of MLflow, at `MLFLOW_TRACKING_URI`, or else in files under `RUN/mlruns`;
    `MLFLOW_EXPERIMENT_NAME` names its experiment."""

    _LONGEST_VALUE, _AT_ONCE = 500, 100

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        place = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").resolve().as_uri()
        if place.startswith("file:"):
            # MLflow asks for this where runs are kept in files.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(place)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "paceline")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._run = self._client.create_run(experiment, run_name=folder.resolve().name).info.run_id
        settings = [Param(key, str(value)[: self._LONGEST_VALUE]) for key, value in config.items()]
        for first in range(0, len(settings), self._AT_ONCE):
            self._client.log_batch(self._run, params=settings[first : first + self._AT_ONCE])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(_mlflow_name(name), v, now, step) for name, v in values.items()]
        for first in range(0, len(metrics), self._AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[first : first + self._AT_ONCE])

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _mlflow_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)


class TrackerThread:
    """An `Observer` that passes the numbers of events to a tracker on a thread of its own.

    `make` creates the tracker, also on the thread. The first error ends the tracker; `note` receives the
    one line about it, on the caller's thread.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], note: Callable[[str], None]) -> None:
        self._name, self._note = name, note
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_QUEUE)
        self._error: str | None = None
        self._dropped = 0
        self._noted = False
        self._corrupt = 0
        self._thread = threading.Thread(
            target=self._run, args=(make,), name=f"tracker {name}", daemon=True
        )
        self._thread.start()

    def on_event(self, event: Event) -> None:
        self._report()
        if isinstance(event, CorruptEvent):
            self._corrupt += 1
            values, step = {"train/corrupt_samples": float(self._corrupt)}, event.step
        else:
            values, step = scalars(event), int(getattr(event, "step", 0))
        if values and self._error is None:
            try:
                self._queue.put_nowait((step, values))
            except queue.Full:
                self._dropped += 1

    def _run(self, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
            while (item := self._queue.get()) is not None:
                tracker.log(*item)
            tracker.close()
        except BaseException as error:  # noqa: BLE001  (a library of others; SystemExit among it)
            self._error = one_line(f"{type(error).__name__}: {error}")[:200]

    def _report(self) -> None:
        if self._noted or (self._error is None and not self._dropped):
            return
        self._noted = True
        reason = self._error or "it is too slow, and loses metrics"
        self._note(
            f"tracker {self._name} failed ({reason}); training goes on, metrics.jsonl has it all"
        )

    def close(self) -> None:
        """Waits a while for what is queued. Reports what went wrong since the last event."""
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=1.0)
            except queue.Full:
                self._dropped += 1
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive() and self._error is None:
                self._error = f"it did not finish within {_CLOSE_S:g} s of the end"
        self._report()


def check_trackers(config: RunConfig) -> list[str]:
    """The trackers of a run; a ConfigError where the package of one is not installed."""
    for name in config.run.trackers:
        package = _PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                "run.trackers", name, f"{package} is not installed",
                f"pip install 'paceline[{name}]', or leave it out",
            )  # fmt: skip
    return list(dict.fromkeys(config.run.trackers))


def open_trackers(
    config: RunConfig, folder: Path, first_step: int, note: Callable[[str], None]
) -> list[TrackerThread]:
    """An observer for each tracker of the run."""
    settings = config.flat()
    made: dict[str, Callable[[], Tracker]] = {
        "csv": lambda: CsvTracker(folder, first_step),
        "tensorboard": lambda: TensorBoardTracker(folder, first_step),
        "wandb": lambda: WandbTracker(folder, settings),
        "mlflow": lambda: MlflowTracker(folder, settings),
    }
    return [TrackerThread(name, made[name], note) for name in check_trackers(config)]
