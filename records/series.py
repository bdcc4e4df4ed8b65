"""Trains a series of runs one after the other in one process, and takes up where it was broken off.

    python series.py SERIES.toml --data-dir DIR --output DIR [--seconds 500] [--only NAME]

A series names its runs; each is a recipe, shipped or a file beside the series, and settings over it. A
run whose folder has a summary.json is done; one with a checkpoint goes on from there. No new run is begun
that would outlast `--seconds`.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
import tomllib
from pathlib import Path

from paceline.config import load_config
from paceline.core.events import EvalEvent, Event
from paceline.train.run import run_training


class Line:
    """One line for each evaluation."""

    def __init__(self, name: str) -> None:
        self._name, self._started = name, time.perf_counter()

    def on_event(self, event: Event) -> None:
        if isinstance(event, EvalEvent):
            seconds = time.perf_counter() - self._started
            words = f"epoch {event.epoch:.0f} top-1 {event.top1:.2f} {seconds:.1f} s"
            print(f"{self._name} {words}", flush=True)

    def close(self) -> None:
        """Nothing is held."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("series", type=Path)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--only", default="*")
    options = parser.parse_args()
    series = tomllib.loads(options.series.read_text(encoding="utf-8"))
    started, longest = time.perf_counter(), 0.0
    for name, run in series["runs"].items():
        folder = options.output / name
        if not fnmatch.fnmatch(name, options.only) or (folder / "summary.json").exists():
            continue
        left = options.seconds - (time.perf_counter() - started)
        epochs = run.get("run.epochs", 90)
        if left < longest * epochs:
            print(f"{name}: not begun, {left:.0f} s left", flush=True)
            continue
        resume = "auto" if (folder / "checkpoints").is_dir() else ""
        settings = {**series["common"], **run, "run.output": str(folder), "run.resume": resume,
                    "data.dir": options.data_dir, "data.source": "auto"}  # fmt: skip
        recipe = settings.pop("recipe")
        beside = options.series.parent / recipe
        recipe = str(beside) if beside.is_file() else recipe
        begun = time.perf_counter()
        try:
            outcome = run_training(load_config(recipe, settings), lambda name=name: Line(name))
        except ValueError as error:  # PacelineError: a diverged run is a result too
            print(f"{name}: {error}", flush=True)
            continue
        taken = time.perf_counter() - begun
        longest = taken / epochs  # the last one: the first run also compiles kernels
        print(f"{name}: top-1 {outcome.summary.get('top1')} in {taken:.1f} s, "
              f"{outcome.summary.get('images_per_s', 0):.0f} images/s", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
