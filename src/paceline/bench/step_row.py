"""One row of `paceline bench step`, measured in a process of its own.

In: a `StepRow` as JSON on the command line. Out: one line of JSON: seconds of a step and images/s. A
process of its own, because compilers, allocators and algorithm caches would carry over from row to
row, and because a compiler that takes too long can be ended.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

PREFIX = "paceline-bench-row "
READY = "paceline-bench-ready"


@dataclass(frozen=True)
class StepRow:
    """`kind` is ours or plain. For ours `switches` are settings `section.key`; for plain
    `switches` has `dtype` (fp32, tf32, bf16, fp16) and `compile` (off, default, reduce-overhead,
    max-autotune). `group`: as the one rank of a process group."""

    name: str
    kind: str
    model: str
    batch_size: int
    image_size: int
    classes: int
    device: str
    steps: int
    warm_up: int
    switches: dict[str, Any]
    group: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StepRow:
        return cls(**json.loads(text))


def measure(row: StepRow, ready: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Builds the step, warms it up, says `ready` and times it."""
    import torch

    from paceline.bench import our_step, plain_step

    started, start_s = time.perf_counter(), 0.0

    def warm() -> None:
        nonlocal start_s
        start_s = time.perf_counter() - started
        ready()

    build = our_step.measure if row.kind == "ours" else plain_step.measure
    times, words = build(row, warm)
    low, high = times.spread
    gib = torch.cuda.max_memory_allocated() / 2**30 if row.device == "cuda" else 0.0
    return {
        "name": row.name,
        "step_s": times.median,
        "step_s_p10": low,
        "step_s_p90": high,
        "steps": len(times.seconds),
        "images_per_s": row.batch_size / times.median,
        "memory_gib": round(gib, 2),
        "start_s": round(start_s, 1),
        "what": words,
    }


def _take_turns() -> None:
    """Tells the parent that the row is warm, and waits for its turn."""
    sys.stdout.write(READY + "\n")
    sys.stdout.flush()
    sys.stdin.readline()


if __name__ == "__main__":
    result = measure(StepRow.from_json(sys.argv[1]), _take_turns)
    sys.stdout.write(PREFIX + json.dumps(result) + "\n")
