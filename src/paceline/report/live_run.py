"""`LiveRun`: a run folder that is read again and again while the run writes to it; `run_folders`: the run
folders of a folder of runs; `metrics_text`: the state of runs in Prometheus' text format.

Only what has been appended since the last look is read. A file that was replaced or has become shorter is
read from its start. A last line without its line end is left for the next look.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import DataError, PacelineError
from paceline.core.files import open_regular
from paceline.core.untrusted import one_line
from paceline.report.outcome import Efficiency, Outcome
from paceline.report.records import RecordLog, finite, middle
from paceline.report.run_files import EVENTS_NAME, RunFiles, assemble, parse_line, rank_files

# What one look reads of a file at most: the page of a huge run appears after several looks.
_MOST_BYTES = 64 << 20


@dataclass
class _Tail:
    """One file of events: how far it has been read, and its records."""

    path: Path
    identity: tuple[int, int] = (0, 0)
    offset: int = 0
    lines: int = 0
    log: RecordLog = field(default_factory=RecordLog)

    def read_on(self) -> bool:
        """Whether there is anything new."""
        with open_regular(self.path) as file:
            status = os.fstat(file.fileno())
            identity, restarted = (status.st_dev, status.st_ino), False
            if identity != self.identity or status.st_size < self.offset:
                restarted = self.lines > 0
                self.identity, self.offset, self.lines, self.log = identity, 0, 0, RecordLog()
            if status.st_size == self.offset:
                return restarted
            file.seek(self.offset)
            content = file.read(_MOST_BYTES)
        whole = content.rfind(b"\n") + 1
        for line in content[:whole].split(b"\n")[:-1]:
            self.lines += 1
            self.log.append(parse_line(line, self.path, self.lines))
            self.offset += len(line) + 1
        return restarted or whole > 0


class LiveRun:
    """`files` is what the folder holds now; None with a `problem` where it cannot be read. `version`
    changes with every change of either."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: RunFiles | None = None
        self.problem = "not read yet"
        self.version = 0
        self._tails: dict[int, _Tail] = {}
        self._others: tuple[object, ...] = ()

    @property
    def name(self) -> str:
        return one_line(self.path.resolve().name)

    def refresh(self) -> None:
        """Reads what is new. Never raises for what the folder holds or lacks."""
        try:
            changed = self._read_on()
            problem = ""
        except PacelineError as error:
            changed, problem = False, str(error)
        except OSError as error:
            changed = False
            problem = f"{self.path} cannot be read: {error.strerror}; it is looked for again"
        if problem:
            self._tails.clear()
            self._others = ()
            self.files = None
        if changed or problem != self.problem:
            self.version += 1
        self.problem = problem

    def _read_on(self) -> bool:
        if not (self.path / EVENTS_NAME).is_file():
            gone = (
                "is gone"
                if self.files is not None or "is gone" in self.problem
                else "does not exist"
            )
            what = f"has no {EVENTS_NAME} yet" if self.path.is_dir() else gone
            raise DataError(f"run folder {self.path} {what}", "it is looked for again")
        found = rank_files(self.path)
        changed = found.keys() != self._tails.keys()
        self._tails = {rank: self._tails.get(rank) or _Tail(file) for rank, file in found.items()}
        for tail in self._tails.values():
            changed |= tail.read_on()
        others = tuple(
            _status(self.path / name) for name in ("summary.json", "config.toml", "evaluation.json")
        )
        # Files appear and vanish in it without a record: checkpoints are removed.
        others += (_status(self.path / "checkpoints"),)
        if changed or others != self._others or self.files is None:
            ranks = {rank: tail.log.current() for rank, tail in self._tails.items()}
            self.files, self._others, changed = assemble(self.path, ranks), others, True
        return changed


def _status(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def run_folders(given: Iterable[Path]) -> list[Path]:
    """Each folder itself, or the run folders in it. One that does not exist yet may become either."""
    found: dict[Path, Path] = {}
    for path in given:
        try:
            inside = sorted(file.parent for file in path.glob(f"*/{EVENTS_NAME}"))
            is_run = (path / EVENTS_NAME).exists()
        except OSError:  # reported where the run is read
            inside, is_run = [], True
        for run in inside if inside and not is_run else [path]:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The name of each folder, with as many of its parents as tell it from the others: `a/run` and
    `b/run`."""
    parts = [tuple(map(one_line, path.resolve().parts)) for path in folders]
    depths = [1] * len(parts)
    while True:
        names = ["/".join(own[-depth:]) for own, depth in zip(parts, depths, strict=True)]
        uses = Counter(names)
        longer = [
            depth + (uses[name] > 1 and depth < len(own))
            for own, name, depth in zip(parts, names, depths, strict=True)
        ]
        if longer == depths:
            return names
        depths = longer


# Steps whose median is the current value of a time or a speed.
_RECENT = 20
_MOST_LOGGED = 200

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metric(NamedTuple):
    """What Prometheus calls a metric, with its current value in one run. A name that ends in `_total` is
    a counter's, all others are gauges'."""

    name: str
    help: str
    value: float | None
    labels: Mapping[str, str] = {}


def metrics_text(runs: Iterable[tuple[str, RunFiles | None]]) -> str:
    """All metrics of all runs, by name, with the label `run`. What is unknown has no sample."""
    samples: dict[str, list[str]] = {}
    for run_name, files in runs:
        for metric in metrics(files):
            kind = "counter" if metric.name.endswith("_total") else "gauge"
            head = [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {kind}"]
            if metric.value is not None and math.isfinite(metric.value):
                labels = {"run": run_name, **metric.labels}
                shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
                found = samples.setdefault(metric.name, head)
                found.append(f"{metric.name}{{{shown}}} {float(metric.value)!r}")
    return "".join(f"{line}\n" for lines in samples.values() for line in lines)


def metrics(files: RunFiles | None) -> list[Metric]:
    """Of one run."""
    up = "Whether the run folder can be read"
    if files is None:
        return [Metric("paceline_up", up, 0.0)]
    outcome, efficiency = Outcome.of(files), Efficiency.of(files)
    steps, evaluated = files.steps(), (files.of_kind("eval") or [{}])[-1]
    saved = (files.of_kind("checkpoint") or [{}])[-1]

    def recent(field: str) -> float | None:
        return middle(steps[field][-_RECENT:])

    top5 = finite(evaluated, "top5") if files.shows_top5 else None
    whole, lost = (efficiency.e, efficiency.lost) if efficiency is not None else (None, {})
    found: list[tuple[str, str, float | None]] = [
        ("up", up, 1.0),
        ("step", "Completed steps", outcome.steps),
        ("total_steps", "Steps of the whole run", outcome.total_steps),
        ("epoch", "Completed epochs", outcome.epochs),
        ("ranks", "Number of ranks", outcome.world_size),
        ("finished", "Whether the run has finished", outcome.state == "finished"),
        ("loss", "Training loss of the latest step", steps.last("loss")),
        ("learning_rate", "Learning rate of the latest step", steps.last("lr")),
        ("loss_scale", "Loss scale of the latest step", steps.last("loss_scale")),
        ("images_per_second", "Training speed, median of the latest steps", recent("images_per_s")),
        ("step_seconds", "Time of a step, median of the latest steps", recent("step_s")),
        ("exposed_communication_seconds", "Wait of rank 0 for the exchange in a step",
         recent("exposed_comm_s")),
        ("input_stall_seconds", "Wait of rank 0 for its input in a step", recent("input_stall_s")),
        ("efficiency", "e of T = S · N · e, over the whole run", whole),
        ("validation_top1_percent", "Top-1 accuracy of the latest evaluation", finite(evaluated, "top1")),
        ("validation_top5_percent", "Top-5 accuracy of the latest evaluation", top5),
        ("validation_loss", "Loss of the latest evaluation", finite(evaluated, "loss")),
        ("skipped_steps_total", "Steps skipped for gradients that are not finite", outcome.skipped_steps),
        ("corrupt_samples_total", "Training samples that could not be decoded", outcome.corrupt_samples),
        ("resumes_total", "How often the run was resumed", outcome.resumes),
        ("checkpoint_step", "Step of the latest checkpoint", finite(saved, "step")),
        ("checkpoint_save_seconds", "Time until the latest checkpoint was in place",
         finite(saved, "save_s")),
        ("checkpoint_stall_seconds", "Time for which its save stopped the steps",
         finite(saved, "stall_s")),
        ("last_event_timestamp_seconds", "Time of the latest record", files.ranks[0].last_time),
    ]  # fmt: skip
    text = "Share of the time that was lost, by cause"
    shares = [Metric("paceline_lost_share", text, lost[cause], {"cause": cause}) for cause in lost]
    logged = [
        Metric("paceline_metric", "Latest value that a callback logged", entries[-1][1],
               {"name": name, "rank": str(rank)})
        for name, of_ranks in list(files.logged().items())[:_MOST_LOGGED]
        for rank, entries in of_ranks.items()
    ]  # fmt: skip
    known = (Metric(f"paceline_{name}", text, value) for name, text, value in found)
    return [*known, *shares, *logged]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
