"""Trackers for CSV, TensorBoard, Weights & Biases and MLflow.

A tracker imports the library that it needs when it is created.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.core.events import EvalEvent, StepEvent
from paceline.core.files import whole_file


class CsvTracker:
    """Writes `metrics.csv` and `metrics-more.csv`.

    `metrics.csv` has one column for each number of a step or evaluation event, and rows by step. Each
    other number is a row of `metrics-more.csv`: step, name, value.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        causes = [f"input_stall_causes/{name}" for name in ("read", "decode", "augment", "copy")]
        # Fields that are not single numbers: tables, texts, and the extra fields of strategies.
        left_out = ("step", "input_stall_causes", "remark", "fields")
        of_steps, of_evaluations = (
            [field.name for field in fields(event) if field.name not in left_out]
            for event in (StepEvent, EvalEvent)
        )
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
    """Opens a CSV file to append to, after removing the rows of steps after `first_step`.

    A resumed run computes these steps again and writes their rows again.
    """
    kept: list[list[str]] = []
    if first_step and path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if row and row[0].isdigit()]
        kept = [row for row in rows if int(row[0]) <= first_step and len(row) == len(columns)]
    with whole_file(path) as raw:
        text = io.StringIO()
        csv.writer(text).writerows([columns, *kept])
        raw.write(text.getvalue().encode())
    return path.open("a", newline="", encoding="utf-8")


class TensorBoardTracker:
    """Writes event files in `RUN/tensorboard`."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hides the steps that a killed process logged after its last checkpoint, which are
        # repeated.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Logs to a run of Weights & Biases, with the settings as its configuration.

    `WANDB_MODE=offline` keeps the run in `RUN/wandb`, and `WANDB_PROJECT` names the project. The
    step is logged as a value and used as the x-axis of all other values. W&B's own step counter is
    not used, because W&B drops values for an earlier step, such as those of a checkpoint written in
    the background.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        offline = os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled")
        if not offline and not wandb.api.api_key:
            # Without a key, W&B would ask for one at the terminal.
            raise RuntimeError("no API key; run `wandb login`, or set WANDB_MODE=offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "paceline"),
            name=folder.resolve().name,
            # The id depends only on the folder, so that a resumed run continues the same W&B run.
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
    """Logs to a run of MLflow at `MLFLOW_TRACKING_URI` or, if that is not set, in `RUN/mlruns`.

    `MLFLOW_EXPERIMENT_NAME` names the experiment to which the run belongs.
    """

    _LONGEST_VALUE, _AT_ONCE = 500, 100

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        place = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").resolve().as_uri()
        if place.startswith("file:"):
            # MLflow stores runs in files only if this variable is set.
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
