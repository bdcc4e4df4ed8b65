"""Run folders with known numbers: single runs, and sets of runs for comparisons."""

import contextlib
import json
import math
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from paceline.core.events import (
    CheckpointEvent,
    EvalEvent,
    Event,
    NoteEvent,
    StartEvent,
    StepEvent,
    StopEvent,
)
from paceline.report.server import WatchServer, open_socket

BEGAN = 1_763_190_000.0  # 2025-11-15 07:00 UTC

SUMMARY: dict[str, Any] = {
    "top1": 90.31,
    "top5": 99.72,
    "images_per_s": 1430.4,
    "epochs": 8.0,
    "steps": 800,
    "world_size": 1,
    "global_batch_size": 120,
    "train_s": 101.2,
    "time_to_target_s": None,
    "recipe": "quickstart",
    "model": "smallnet",
    "stopped_by": "finished",
    "corrupt_samples": 0,
    "weights_sha256": "9f" * 32,
    "versions": {"paceline": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cpu"},
    "hardware": {"cpu": "2 cores", "gpus": []},
}
CONFIG: dict[str, Any] = {
    "run": {"seed": 0, "epochs": 8},
    "model": {"name": "smallnet"},
    "optim": {"lr": 0.4, "momentum": 0.9, "nesterov": True, "milestones": [3, 6]},
}


def append_text(folder: Path, text: str, name: str = "metrics.jsonl") -> None:
    with (folder / name).open("a", encoding="utf-8") as file:
        file.write(text)


def append(folder: Path, *events: Event) -> None:
    for event in events:
        # The records of made-up runs are a tenth of a second apart.
        append_text(folder, json.dumps({**event.to_dict(), "time": BEGAN + 81}) + "\n")


@contextlib.contextmanager
def served(runs: Sequence[Path], token: str = "") -> Iterator[WatchServer]:
    with WatchServer(runs, open_socket("127.0.0.1", 0), token) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def start(step: int = 0, total_steps: int = 800, **more: Any) -> StartEvent:
    event = StartEvent(step, total_steps, 100.0, 1, 120, chosen={"comm.backend": "none"})
    return replace(event, **more)


def step(number: int, loss: float = 1.0, *, total: int = 800, **more: Any) -> StepEvent:
    lr = 0.4 * min(1.0, number / 100) * 0.5 * (1 + math.cos(math.pi * number / total))
    event = StepEvent(number, number / 100, loss, lr, 1430.0, 0.084, 0.002)
    return replace(event, **more)


def evaluation(number: int, top1: float = 80.0, **more: Any) -> EvalEvent:
    return replace(EvalEvent(number, number / 100, top1, 99.0, 0.5, 2000, 1.5), **more)


def finished_events(steps: int = 800) -> list[Event]:
    """A whole run: noisy loss, rising accuracy, an evaluation and a checkpoint an epoch."""
    noise = random.Random(1)
    events: list[Event] = [start(total_steps=steps), NoteEvent("threads = 2 (two cores)")]
    for number in range(1, steps + 1):
        loss = 0.3 + 2 * math.exp(-number / 150) + 0.15 * noise.random()
        speed = 1400 + 60 * noise.random()
        events.append(step(number, loss, total=steps, images_per_s=speed))
        if number % 100 == 0 and number <= 20_000:
            top1 = 90.5 - 30 * math.exp(-number / 180)
            events.append(evaluation(number, top1, top5=99.8 - 5 * math.exp(-number / 180)))
            events.append(CheckpointEvent(number, f"checkpoints/step-{number}.pt", 0.05))
    return [*events, StopEvent(steps, "finished")]


def write_events(path: Path, events: Iterable[Event], seconds_apart: float = 0.1) -> None:
    lines = (
        json.dumps({**event.to_dict(), "time": BEGAN + place * seconds_apart})
        for place, event in enumerate(events)
    )
    path.write_text("".join(f"{line}\n" for line in lines).replace("NaN", "null"), "utf-8")


# Runs for comparisons: a whole configuration, known accuracies, few events.
EPOCHS = 4
STEPS_PER_EPOCH = 5

SETTINGS: dict[str, Any] = {
    "run.name": "cifar10",
    "run.epochs": EPOCHS,
    "run.seed": 0,
    "run.output": "",
    "run.resume": "",
    "run.global_batch_size": 250,
    "run.threads": 1,
    "model.name": "resnet18",
    "optim.name": "sgd",
    "optim.lr_base": 0.2,
    "optim.decay_bias_norm": False,
    "optim.step.epochs": [2.0, 3.0],
    "data.dir": "",
}


def events_of(
    top1: float, *, epochs: int, done: int, batch: int, ranks: int, loss: float
) -> list[Event]:
    """Accuracy rises to `top1`, by way of a best epoch that lies above it."""
    total = epochs * STEPS_PER_EPOCH
    size = {"world_size": ranks, "global_batch_size": batch}
    events: list[Event] = [start(0, total, steps_per_epoch=float(STEPS_PER_EPOCH), **size)]
    for number in range(1, done * STEPS_PER_EPOCH + 1):
        epoch = number / STEPS_PER_EPOCH
        events.append(StepEvent(number, epoch, 2.0 / epoch, 0.1, 1000.0 + number, 0.1, 0.01))
        if number % STEPS_PER_EPOCH == 0:
            left = done - number // STEPS_PER_EPOCH
            value = {0: top1, 1: min(99.0, top1 + 3)}.get(left, max(10.0, top1 - 10.0 * left))
            events.append(EvalEvent(number, epoch, value, 99.0, loss + left, 2000, 1.0))
    return events


def write_run(
    folder: Path,
    top1: float,
    *,
    done: int | None = None,
    stopped_by: str | None = None,
    ranks: int = 1,
    val_loss: float = 0.5,
    images_per_s: float = 1000.0,
    events: Iterable[Event] | None = None,
    without: Iterable[str] = (),
    **settings: Any,
) -> Path:
    """`write_run(folder, 90.0, run__seed=1)`; with `done` below the epochs it is under way.

    `stopped_by` ends it there all the same. `without` leaves settings out.
    """
    flat = SETTINGS | {name.replace("__", "."): value for name, value in settings.items()}
    epochs, batch = flat["run.epochs"], flat["run.global_batch_size"]
    done = epochs if done is None else done
    reason = stopped_by or ("finished" if done == epochs else None)
    recorded = list(
        events_of(top1, epochs=epochs, done=done, batch=batch, ranks=ranks, loss=val_loss)
        if events is None
        else events
    )
    if reason is not None:
        recorded.append(StopEvent(done * STEPS_PER_EPOCH, reason))
    folder.mkdir(parents=True)
    write_events(folder / "metrics.jsonl", recorded)
    tables: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        section, _, key = name.partition(".")
        if name not in without:
            tables.setdefault(section, {})[key] = value
    (folder / "config.toml").write_text(tomli_w.dumps(tables), "utf-8")
    if reason in ("finished", "target"):
        summary = {
            "recipe": flat["run.name"], "top1": top1, "val_loss": val_loss, "epochs": float(done),
            "images_per_s": images_per_s, "train_s": 600.0, "world_size": ranks,
            "global_batch_size": batch, "stopped_by": reason, "steps": done * STEPS_PER_EPOCH,
        }  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(summary), "utf-8")
    return folder


def write_ablation(home: Path) -> list[Path]:
    """SGD with two seeds, LARS with three at ten times the batch, and a LARS run under way."""
    lars: dict[str, Any] = {
        "optim__name": "lars",
        "run__global_batch_size": 2500,
        "optim__lr_base": 3.0,
        "images_per_s": 2000.0,
    }
    return [
        write_run(home / "sgd-0", 94.0),
        write_run(home / "sgd-1", 94.4, run__seed=1),
        *(
            write_run(home / f"lars-{seed}", 93.0 + 0.1 * seed, run__seed=seed, **lars)
            for seed in range(3)
        ),
        write_run(home / "lars-3", 60.0, done=2, run__seed=3, **lars),
    ]
