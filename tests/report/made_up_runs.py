"""What made-up runs consist of: the events are core's own, the numbers known."""

import json
import math
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.core.events import (
    CheckpointEvent,
    EvalEvent,
    Event,
    NoteEvent,
    StartEvent,
    StepEvent,
    StopEvent,
)

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
