"""`TrackerThread`: passes the numbers in events of a run to an experiment tracker.

A tracker runs on its own thread and reads from a queue, because its server may be slow, offline or
full. If the tracker fails, training continues, and one line reports the failure.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from paceline.core.events import (
    CheckpointEvent,
    CorruptEvent,
    EvalEvent,
    Event,
    MetricEvent,
    RanksEvent,
    StepEvent,
)
from paceline.core.untrusted import one_line

# The most events that wait in the queue for a slow tracker; further events are dropped.
_QUEUE = 20_000
# Seconds for which the end of a run waits until a tracker has finished.
_CLOSE_S = 20.0
_PREFIXES: dict[type[Event], str] = {
    StepEvent: "train", EvalEvent: "val", CheckpointEvent: "checkpoint", RanksEvent: "ranks",
    MetricEvent: "metric",
}  # fmt: skip


def scalars(event: Event) -> dict[str, float]:
    """Returns all finite numbers of an event, with the names under which trackers log them.

    Examples of names are `train/loss`, `train/input_stall_causes/decode`, `val/top1`,
    `ranks/step_s/max` and `metric/NAME`.
    """
    prefix = _PREFIXES.get(type(event))
    if prefix is None:
        return {}
    named: dict[str, Any] = {}
    for name, value in event.to_dict().items():
        if name == "step":
            continue
        if isinstance(value, Mapping):
            # An event of a callback has only `values`, which are named without that level.
            inner = prefix if name == "values" else f"{prefix}/{name}"
            named |= {f"{inner}/{key}": number for key, number in value.items()}
        else:
            named[f"{prefix}/{name}"] = value
    numbers = {
        name: float(value) for name, value in named.items() if isinstance(value, int | float)
    }
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


class Tracker(Protocol):
    """A client of a tracking service; one thread calls it, and it may raise any exception."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TrackerThread:
    """An `Observer` that passes the numbers of events to a tracker on its own thread.

    After its first error, the tracker is not called any more.

    Args:
        name: The name of the tracker, for the report of an error and for the thread.
        make: Creates the tracker; it is called on the new thread.
        note: Is called with one line about an error, on the thread that calls `on_event` or
            `close`.
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
        reason = self._error or "it is too slow and loses metrics"
        self._note(
            f"tracker {self._name} failed ({reason}); training continues; metrics.jsonl has all metrics"
        )

    def close(self) -> None:
        """Waits a limited time until all queued numbers are logged; reports a tracker's error."""
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=1.0)
            except queue.Full:
                self._dropped += 1
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive() and self._error is None:
                self._error = f"it did not finish within {_CLOSE_S:g} s of the end"
        self._report()
