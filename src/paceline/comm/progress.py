"""Records how far a rank is in a step, for the watchdog and for error messages.

`ExchangeObserver` receives the events of a step's gradient exchange. `ProgressBoard` is such an
observer and keeps this rank's `RankProgress`, which is small enough to be published every few seconds.
The progress of two ranks can be compared, because all ranks call the same collectives in the same
order.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from paceline.core.units import format_bytes
from paceline.core.untrusted import ParseError, is_count, parse_table

_NAMED_TENSORS = 3


class ExchangeObserver:
    """Receives the events of a gradient exchange. The methods of this base class do nothing.

    Each step of the training calls `step_begun` first and `step_ended` last. In between, it calls
    `sent`, `begun` and `ended` for each bucket, with the bucket's index in the plan. An observer must
    not change the gradients, and must be quick, because the exchange waits for it.

    A transport with a communication thread calls `begun` and `ended` on that thread, possibly at the same
    time as methods on the main thread. With NCCL, `begun` means that the all-reduce has been queued on
    the device, and `ended` that the wait for its result has been queued. A step that replays a CUDA graph
    only calls `step_begun` and `step_ended`.
    """

    def step_begun(self, step: int) -> None:
        """Called before the first micro-step of optimizer step `step`, counted from 0."""

    def sent(self, bucket: int) -> None:
        """Called when the bucket is full on this rank and has been passed to the transport."""

    def begun(self, bucket: int) -> None:
        """Called when the bucket's first message is sent to the other ranks."""

    def ended(self, bucket: int) -> None:
        """Called when the bucket's sum over ranks is complete."""

    def step_ended(self, exposed_s: float) -> None:
        """Called when all sums are complete.

        Args:
            exposed_s: Seconds that the step waited for the sums after its own backward pass. On a
                GPU this is the latest known value, possibly of an earlier step, because reading the
                current one would block.
        """


@dataclass(frozen=True)
class RankProgress:
    """How far one rank is in its step and its collectives.

    Attributes:
        step: The step of the gradient exchange, counted from 0.
        begun: Number of buckets of this step whose all-reduce has begun.
        ended: Number of buckets of this step whose all-reduce has ended.
        calls: Number of collectives that this rank has entered outside of steps.
        call: The name of the collective that this rank is running, or "".
        computes: True from the start of a step to the end of its gradient exchange.
    """

    step: int = -1
    begun: int = 0
    ended: int = 0
    calls: int = 0
    call: str = ""
    computes: bool = False

    @property
    def in_exchange(self) -> bool:
        return self.begun > self.ended

    @property
    def waits(self) -> bool:
        """Returns True if this rank waits for other ranks."""
        return self.in_exchange or bool(self.call)

    @property
    def doing(self) -> str:
        """Returns what this rank does, as a text for messages such as `in bucket 3 of step 12`."""
        if self.in_exchange:
            return f"in bucket {self.ended + 1} of step {self.step + 1}"
        if self.call:
            return f"in {self.call}"
        if self.computes:
            return f"computing step {self.step + 1}"
        return f"after step {self.step + 1}" if self.step >= 0 else "before the first step"

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> RankProgress:
        """Parses a rank's progress. Raises ParseError if no rank can have written the text."""
        table = parse_table(text)
        numbers = ("step", "begun", "ended", "calls")
        if (
            table.keys() != cls.__dataclass_fields__.keys()
            or not all(is_count(table[name], -1) for name in numbers)
            or not isinstance(table["call"], str)
            or type(table["computes"]) is not bool
        ):
            raise ParseError("is no progress")
        return cls(**table)


class ProgressBoard(ExchangeObserver):
    """Keeps this rank's progress. Several threads may write and read concurrently.

    Each step updates the progress many times, and a background thread seldom reads it. So updates are
    fast.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: dict[str, Any] = asdict(RankProgress())

    @property
    def progress(self) -> RankProgress:
        with self._lock:
            return RankProgress(**self._now)

    def reset(self) -> None:
        """Resets the progress to that of a rank before its first step."""
        self._update(**asdict(RankProgress()))

    def _update(self, **changes: int | str | bool) -> None:
        with self._lock:
            self._now.update(changes)

    def step_begun(self, step: int) -> None:
        self._update(step=step, begun=0, ended=0, computes=True)

    def begun(self, bucket: int) -> None:
        self._update(begun=bucket + 1)

    def ended(self, bucket: int) -> None:
        self._update(ended=bucket + 1)

    def step_ended(self, exposed_s: float) -> None:
        self._update(computes=False)

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """Records that this rank is in the collective `call` while the block runs.

        If the collective fails, the rank ends, and the progress keeps the name `call`.
        """
        now = self._now
        # Calls inside a step are not counted: their number differs if only some ranks replay a CUDA
        # graph.
        self._update(calls=now["calls"] + (not now["computes"]), call=call)
        yield
        self._update(call="")


@dataclass(frozen=True)
class BucketInfo:
    """Describes a gradient bucket for messages and traces. `bytes` is its size in the wire format."""

    bytes: int
    algorithm: str
    tensors: tuple[str, ...]
    wire: str = "auto"

    def label(self, number: int) -> str:
        """Returns a text such as `bucket 3, 16.2 MiB, ring`."""
        return f"bucket {number}, {format_bytes(self.bytes)}, {self.algorithm}"

    def describe(self, number: int, of: int) -> str:
        first = ", ".join(self.tensors[:_NAMED_TENSORS])
        more = len(self.tensors) - _NAMED_TENSORS
        rest = f" and {more} more" if more > 0 else ""
        return (
            f"bucket {number} of {of} ({format_bytes(self.bytes)}, {self.algorithm}: {first}{rest})"
        )
