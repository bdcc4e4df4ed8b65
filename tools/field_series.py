"""Trains the comparison of docs/why-not.md: optimizers, schedules and batch growth on equal terms.

    python tools/field_series.py OUTPUT --data-dir CIFAR10 [--seconds 1500] [--only 'sgd*'] [--list]
    python tools/field_series.py OUTPUT --data-dir CIFAR10 --speed

CIFAR-10, a ResNet of 4.9 million parameters, 16 epochs, batches of 256, 2,500 and 10,000 (schedules: 256
and 10,000). Every option has the same tuning budget: three values of its main knob with seed 0. The best
one is trained with seeds 1 and 2 too. All trainings run in one process, one after the other. A run whose
folder has a summary is done, and so is one that diverged (`failed.txt`): the same command continues a
series that was broken off. A run that fails for another reason is left out, and tried again by the next
command. Several processes share the rows with `--claims DIR`. A process gives up its claim on a row that
it leaves incomplete; if it is killed, remove the file. Times of processes side by side mislead, and
`--speed` times two epochs of each optimizer with nothing beside it (`speed.jsonl`). No run begins that
would outlast `--seconds`. Writes, after each row, `tuning.md` (every try) and `compare.sh` (the
comparison). Exit code 0: all rows of `--only` and `--batches` have their results; 1: a run failed, or the
data cannot be read; 3: the time was over, a signal ended the series, or another process has a row that is
not complete.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from paceline.config import load_config, parse_assignment
from paceline.core.errors import (
    DataError,
    DeviceError,
    DivergedError,
    PacelineError,
)
from paceline.core.events import Event
from paceline.core.imports import object_name
from paceline.data import Source, open_source
from paceline.models.resnet import BasicBlock, ResNet
from paceline.train import RunOutcome, run_training
from paceline.train.components import Components

BATCHES = (256, 2500, 10_000)
ENDS = (256, 10_000)
MICRO = {256: 256, 2500: 500, 10_000: 1000}
SEEDS = (0, 1, 2)
FACTORS = (1 / 3, 1.0, 3.0)
# Ten steps of warm-up, two epochs at 10,000, let the loss of SGD explode.
WARM_UP = {256: 2.0, 2500: 5.0, 10_000: 5.0}
EPOCHS = 16
# The same shares of the run as 30, 60 and 80 of 90 epochs.
STEPS = [EPOCHS * share for share in (1 / 3, 2 / 3, 8 / 9)]
COMMON: dict[str, Any] = {
    "run.epochs": EPOCHS, "run.cutmix": 0.0, "run.smoothing": 0.1, "run.eval_interval_epochs": 4,
    "run.compile": "off", "optim.nesterov": False, "optim.weight_decay": 5e-4,
    "checkpoint.interval_epochs": 0, "checkpoint.keep": 1, "checkpoint.keep_best": False,
}  # fmt: skip
NO_CYCLE: dict[str, Any] = {"optim.warmup_epochs": 0.0}
FIXED_SAMPLES: dict[str, Any] = {
    "data.augment": "none", "data.flip": False, "data.cutout": 0, "optim.momentum": 0.0,
    "optim.warmup_epochs": 0.0, "precision.amp_dtype": "fp32",
}  # fmt: skip
# An epoch with a centering costs three passes over the data: about the passes of 16 plain epochs.
THREE_PASSES: dict[str, Any] = {**FIXED_SAMPLES, "run.epochs": 5}


@dataclass(frozen=True)
class Option:
    """One row of the table: its settings, and the middle of its knob at each batch. `sizes` has the
    batch at which a run begins where that is not the row's own."""

    name: str
    middles: Mapping[int, float]
    settings: Mapping[str, Any] = field(default_factory=dict)
    knob: str = "optim.lr"
    sizes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def at(self, batch: int) -> dict[str, Any]:
        """The settings at a batch, without the knob."""
        return {
            "run.global_batch_size": batch, "run.batch_size": MICRO.get(batch),
            "optim.warmup_epochs": WARM_UP.get(batch), **self.settings, **self.sizes.get(batch, {}),
        }  # fmt: skip


SGD = {256: 0.2, 2500: 0.5, 10_000: 0.5}
SGD_ENDS = {batch: SGD[batch] for batch in ENDS}
STEP = {"optim.schedule": "step", "optim.decay_epochs": STEPS}
# From 256 to 4,096, and from 2,500 to 10,000: where the rate would decay by a quarter, or a half.
GROWS = {
    256: {"optim.batch_schedule": "x4", "optim.decay_rate": 0.25, "optim.batch_limit": 4096},
    10_000: {
        "run.global_batch_size": 2500, "run.batch_size": 500, "optim.batch_schedule": "x2",
        "optim.decay_rate": 0.5, "optim.batch_limit": 10_000,
    },
}  # fmt: skip
STAYS = {
    batch: {key: value for key, value in values.items() if not key.startswith("optim.batch_")}
    for batch, values in GROWS.items()
}
OPTIONS = (
    # Optimizers, with the cosine schedule.
    Option("sgd", SGD),
    Option("nesterov", SGD, {"optim.nesterov": True}),
    Option(
        "lars",
        {256: 0.8, 2500: 2.6, 10_000: 3.9},
        {"optim.name": "lars", "optim.trust_coefficient": 0.0075},
    ),
    Option(
        "muon",
        {256: 1.0, 2500: 3.9, 10_000: 3.9},
        {"optim.name": "muon", "optim.trust_coefficient": 0.00256},
    ),
    Option(
        "lamb",
        {256: 2e-3, 2500: 5e-3, 10_000: 1e-2},
        {"optim.name": "lamb", "optim.weight_decay": 0.02},
    ),
    Option(
        "adamw",
        {256: 1e-3, 2500: 2e-3, 10_000: 4e-3},
        {"optim.name": "adamw", "optim.weight_decay": 0.05},
    ),
    Option(
        "akiba",
        SGD,
        {
            "optim.name": "rmsprop_warmup",
            "optim.warmup_epochs": 0.0,
            "optim.rms_center_epochs": 2.0,
            "optim.rms_width_epochs": 1.0,
            "optim.schedule": "piecewise",
            "optim.decay_epochs": [EPOCHS * share for share in (40 / 90, 70 / 90, 85 / 90)],
            "model.norm_statistics": "last",
        },
    ),
    # Schedules of momentum SGD.
    Option(
        "goyal",
        {256: 0.2, 10_000: 1.0},
        {**STEP, "optim.nesterov": True, "optim.warmup_epochs": 5.0},
    ),
    Option("step", SGD_ENDS, STEP),
    Option("one-cycle", SGD_ENDS, {**NO_CYCLE, "optim.schedule": "one_cycle"}),
    Option("one-cycle-10", SGD_ENDS, {**NO_CYCLE, "optim.schedule": "one_cycle", "run.epochs": 10}),
    Option(
        "triangular",
        SGD_ENDS,
        {**NO_CYCLE, "optim.schedule": "triangular", "optim.cycle_epochs": 8.0},
    ),
    # The batch grows in place of the decays of a step schedule.
    Option("growth", SGD_ENDS, STEP, sizes=GROWS),
    Option("no-growth", SGD_ENDS, STEP, sizes=STAYS),
    # Variance reduction, on fixed images and without augmentation.
    Option("sgd-fixed", {256: 0.2}, FIXED_SAMPLES),
    Option("svrg", {256: 0.2}, {**THREE_PASSES, "optim.name": "svrg"}),
    Option(
        "halp-8",
        {256: 0.2},
        {**THREE_PASSES, "optim.name": "halp", "optim.bits": 8, "optim.halp_mu": 1.0},
    ),
    Option("halp-16", {256: 0.2}, {**THREE_PASSES, "optim.name": "halp", "optim.bits": 16}),
)
# Their steps differ; a schedule costs nothing.
TIMED = (
    "sgd", "nesterov", "lars", "muon", "lamb", "adamw", "akiba", "sgd-fixed", "svrg", "halp-8", "halp-16",
)  # fmt: skip


def resnet10(num_classes: int, in_channels: int) -> nn.Module:
    """Of about ResNet-9's size, with the kernels of ResNet-18."""
    return ResNet(
        BasicBlock, (1, 1, 1, 1), num_classes=num_classes, in_channels=in_channels, stem="small",
        zero_init_gamma=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """One training."""

    option: Option
    batch: int
    value: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.option.name}-b{self.batch}-{self.value:g}-s{self.seed}"

    def settings(self) -> dict[str, Any]:
        return {**COMMON, **self.option.at(self.batch), self.option.knob: self.value,
                "run.seed": self.seed}  # fmt: skip


class Quiet:
    """Shows nothing: the series prints a line for each run."""

    def on_event(self, event: Event) -> None: ...

    def close(self) -> None: ...


class SeriesStoppedError(Exception):
    """The time is over, or a signal arrived."""


class Series:
    """Trains what is missing in `output`. `failed` has the runs that ended with another error than
    divergence."""

    def __init__(
        self, output: Path, overrides: Mapping[str, Any], seconds: float, model: str = "",
        claims: Path | None = None,
    ) -> None:  # fmt: skip
        self.output = output
        self._claims = claims
        self.failed: list[str] = []
        self._overrides = overrides
        self._model = model
        self._ends = time.monotonic() + seconds
        self._last_s = 0.0
        self._data: tuple[Source, Source] | None = None

    def run(self, options: Sequence[Option], batches: Sequence[int]) -> bool:
        """False where the time did not suffice, or a row of another process is not complete."""
        self._report(options, batches)
        rows = [(o, batch) for o in options for batch in batches if batch in o.middles]
        ours: list[tuple[Option, int]] = []
        try:
            for option, batch in rows:
                if self._claim(option, batch):
                    ours.append((option, batch))
                    self._row(option, batch)
                    self._report(options, batches)
        except SeriesStoppedError as end:
            print(f"{end}; the same command continues", flush=True)
            self._report(options, batches)
            return False
        finally:
            for row in ours:
                if self._claims is not None and not self._is_done(*row):
                    self._claim_file(self._claims, *row).unlink(missing_ok=True)
        others = [row for row in rows if row not in ours and not self._is_done(*row)]
        for option, batch in others:
            print(f"{option.name}-b{batch}: not complete, another process has it", flush=True)
        return not others

    def _claim(self, option: Option, batch: int) -> bool:
        """Whether the row is this process's. It stays with it while the process runs: another one would
        fail in the same way."""
        if self._claims is None:
            return True
        self._claims.mkdir(parents=True, exist_ok=True)
        try:
            self._claim_file(self._claims, option, batch).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    @staticmethod
    def _claim_file(claims: Path, option: Option, batch: int) -> Path:
        return claims / f"{option.name}-b{batch}"

    def _is_done(self, option: Option, batch: int) -> bool:
        """Whether all runs of the row have results: the tries, and all seeds of the best one."""
        tries = self.tries(option, batch)
        best = max(tries, key=self.top1)
        seeds = SEEDS if self.top1(best) >= 0 else ()
        runs = [*tries, *(Planned(option, batch, best.value, seed) for seed in seeds)]
        return all(self.result(planned) is not None for planned in runs)

    def time_steps(self, options: Sequence[Option], batches: Sequence[int]) -> bool:
        """Two epochs of each optimizer at the middle of its knob; the first one compiles kernels. False
        where the time did not suffice, or a signal arrived."""
        lines = self.output / "speed.jsonl"
        done = (
            [json.loads(line) for line in lines.read_text().splitlines()] if lines.is_file() else []
        )
        timed = {(line["option"], line["batch"]) for line in done}
        for option in options:
            for batch in batches:
                if option.name not in TIMED or batch not in option.middles:
                    continue
                if (option.name, batch) in timed:
                    continue
                if time.monotonic() + self._last_s > self._ends:
                    print("the time is over; the same command continues", flush=True)
                    return False
                begun = time.monotonic()
                gc.collect()
                planned = Planned(option, batch, option.middles[batch], SEEDS[0])
                folder = self.output / "speed" / planned.name
                outcome = self._outcome(planned, folder, {"run.epochs": 2})
                if outcome.result.stop_signal is not None:
                    shutil.rmtree(folder, ignore_errors=True)  # a part of a run is no measurement
                    print(
                        f"{planned.name}: ended by a signal; the same command continues", flush=True
                    )
                    return False
                summary = outcome.summary
                found = {
                    "option": option.name, "batch": batch,
                    "images_per_s": round(float(summary["images_per_s"]), 1),
                    "state_bytes_per_parameter": summary["state_bytes_per_parameter"],
                }  # fmt: skip
                with lines.open("a") as log:
                    log.write(json.dumps(found) + "\n")
                print(json.dumps(found), flush=True)
                self._last_s = time.monotonic() - begun
        return True

    def _row(self, option: Option, batch: int) -> None:
        tries = self.tries(option, batch)
        for planned in tries:
            self._train(planned)
        best = max(tries, key=self.top1)
        # No best value where one failed, or where all diverged.
        if self.top1(best) >= 0 and all(self.result(planned) is not None for planned in tries):
            for seed in SEEDS:
                self._train(Planned(option, batch, best.value, seed))

    def tries(self, option: Option, batch: int) -> list[Planned]:
        """The tuning budget: three values, one seed."""
        return [
            Planned(option, batch, float(f"{option.middles[batch] * factor:.2g}"), SEEDS[0])
            for factor in FACTORS
        ]

    def _train(self, planned: Planned) -> None:
        """Trains unless that is done."""
        if self.result(planned) is not None or planned.name in self.failed:
            return
        if time.monotonic() + self._last_s > self._ends:
            raise SeriesStoppedError(f"{planned.name}: not begun, the time is over")
        gc.collect()  # garbage of the run before must not be freed during a graph capture
        begun = time.monotonic()
        try:
            line = self._top1_line(planned)
        except DivergedError as error:  # a result, too
            line = f"failed: {error}"
            (self.output / planned.name / "failed.txt").write_text(f"{error}\n")
            _keep_records(self.output / planned.name)
        except (SeriesStoppedError, DataError, DeviceError):
            raise  # of errors: those with which no other run would do better
        except Exception as error:  # noqa: BLE001 - a bug in one option costs no other its time
            line = f"failed: {error}"
            self.failed.append(planned.name)
            if not isinstance(error, PacelineError):
                traceback.print_exc()
        self._last_s = time.monotonic() - begun
        print(f"{planned.name}: {line}, {self._last_s:.1f} s", flush=True)

    def _top1_line(self, planned: Planned) -> str:
        folder = self.output / planned.name
        outcome = self._outcome(planned, folder, {})
        if outcome.result.stop_signal is not None:
            raise SeriesStoppedError(f"{planned.name}: ended by a signal")
        summary = outcome.summary
        return f"top-1 {summary['top1']:.2f}, {summary['images_per_s']:,.0f} images/s"

    def _outcome(self, planned: Planned, folder: Path, more: Mapping[str, Any]) -> RunOutcome:
        resumes = any((folder / "checkpoints").glob("step-*.pt"))
        if not resumes:  # of a run that was killed before its first checkpoint
            shutil.rmtree(folder, ignore_errors=True)
        values = {
            **planned.settings(),
            **more,
            **self._overrides,
            "run.output": str(folder),
            "run.resume": "auto" if resumes else "",
            "run.name": f"{planned.option.name}-b{planned.batch}",
        }
        if self._model:
            values["model.name"] = self._model
        else:
            values |= {"model.name": object_name(resnet10), "model.stem": "auto"}
        config = load_config("cifar10-resnet18", values)
        if config.data.dir and self._data is None:  # decoded once, for all runs
            train = open_source(config.data, "train")
            self._data = train, open_source(config.data, "val", train.classes)
        train_data, val_data = self._data or (None, None)
        components = Components(
            model=None if self._model else resnet10, train_data=train_data, val_data=val_data
        )
        outcome = run_training(config, Quiet, None, components)
        if outcome.result.stop_signal is None:
            _keep_records(folder)
        return outcome

    def result(self, planned: Planned) -> float | None:
        """Top-1 of a run that is done, −1 where it diverged; None where it is not done."""
        folder = self.output / planned.name
        if (folder / "failed.txt").is_file():
            return -1.0
        try:
            found = json.loads((folder / "summary.json").read_text())
        except (OSError, ValueError):
            return None
        return float(found["top1"]) if found.get("top1") is not None else -1.0

    def top1(self, planned: Planned) -> float:
        found = self.result(planned)
        return -1.0 if found is None else found

    def _rows(
        self, options: Sequence[Option], batches: Sequence[int]
    ) -> Iterator[tuple[Option, int, Planned]]:
        for option in options:
            for batch in batches:
                if batch in option.middles:
                    tries = self.tries(option, batch)
                    if all(self.result(planned) is not None for planned in tries):
                        yield option, batch, max(tries, key=self.top1)

    def _report(self, options: Sequence[Option], batches: Sequence[int]) -> None:
        """The tuning log, and the comparison of the runs with the best values."""
        lines = ["| option | batch | knob | values → top-1 % (seed 0) | best |"]
        lines.append("| --- | --- | --- | --- | --- |")
        folders = []
        for option, batch, best in self._rows(options, batches):
            tried = [(p.value, self.top1(p)) for p in self.tries(option, batch)]
            shown = ", ".join(
                f"{v:g} → " + (f"{t:.2f}" if t >= 0 else "diverged") for v, t in tried
            )
            lines.append(
                f"| {option.name} | {batch:,} | `{option.knob}` | {shown} | {best.value:g} |"
            )
            runs = [Planned(option, batch, best.value, seed) for seed in SEEDS]
            folders += [p.name for p in runs if self.top1(p) >= 0]
        self.output.mkdir(parents=True, exist_ok=True)
        (self.output / "tuning.md").write_text("\n".join(lines) + "\n")
        command = shlex.join(["paceline", "compare", *folders])
        (self.output / "compare.sh").write_text(f'cd "$(dirname "$0")"\n{command}\n')


def _keep_records(folder: Path) -> None:
    """Removes what `paceline compare` does not read of a run that is done: 80 MB."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    for name in ("weights.safetensors", "report.html"):
        (folder / name).unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--data-dir", default="", help="CIFAR-10 in one of its published forms.")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--only", default="*", help="A pattern of the options' names.")
    parser.add_argument("--batches", default="", help="Numbers, with commas; all of the options.")
    parser.add_argument("--model", default="", help="A model instead of the ResNet of this tool.")
    parser.add_argument("--set", action="append", default=[], help="section.key=value, over all.")
    parser.add_argument("--claims", type=Path, help="of processes that share the rows")
    parser.add_argument("--speed", action="store_true", help="Time the optimizers' steps, and end.")
    parser.add_argument("--list", action="store_true", help="Show the runs of the tuning, and end.")
    given = parser.parse_args(arguments)
    options = [option for option in OPTIONS if fnmatch.fnmatch(option.name, given.only)]
    batches = [int(text) for text in given.batches.split(",") if text] or list(BATCHES)
    overrides = dict(parse_assignment(text) for text in given.set)
    if given.data_dir:
        overrides |= {"data.dir": given.data_dir, "data.source": "auto"}
    series = Series(given.output, overrides, given.seconds, given.model, given.claims)
    if given.list:
        for option in options:
            for batch in batches:
                for planned in series.tries(option, batch) if batch in option.middles else ():
                    print(planned.name)
        return 0
    try:
        if given.speed:
            given.output.mkdir(parents=True, exist_ok=True)
            return 0 if series.time_steps(options, batches) else 3
        complete = series.run(options, batches)
    except PacelineError as error:
        print(error, file=sys.stderr)
        return 1
    for name in series.failed:
        print(f"{name} failed", file=sys.stderr)
    return (1 if series.failed else 0) if complete else 3


if __name__ == "__main__":
    sys.exit(main())
