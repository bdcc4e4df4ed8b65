"""How far each rank has come.

`ExchangeObserver` receives the events of a step's exchange. `ProgressBoard` is one of them: it keeps
this rank's `RankProgress`, small enough to be published every few seconds and comparable between ranks,
because all ranks make the same calls in the same order.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from paceline.core.units import format_bytes
from paceline.core.untrusted import ParseError, is_count, parse_table

_NAMED_TENSORS = 3


class ExchangeObserver:
    """Receives the events of an exchange; these methods do nothing.

    For each step: `step_begun`; for each bucket of the plan, by its index, `sent`, `begun` and `ended`;
    then `step_ended`. An observer never changes what is exchanged, and must be quick, because the
    exchange waits for it. `begun` and `ended` are called on the communication thread where the
    transport has one, possibly at the same time as methods on the main thread. Where the device
    exchanges by itself (NCCL) they mean that the all-reduce, and the wait for it, have been queued. A
    replayed CUDA graph calls `step_begun` and `step_ended` alone.
    """

    def step_begun(self, step: int) -> None:
        """Optimizer step `step`, counted from 0; before its first micro-step."""

    def sent(self, bucket: int) -> None:
        """The bucket is full on this rank and handed to the transport."""

    def begun(self, bucket: int) -> None:
        """Its first message goes to the other ranks."""

    def ended(self, bucket: int) -> None:
        """Its sum over ranks is complete."""

    def step_ended(self, exposed_s: float) -> None:
        """All sums are complete; the step waited this long for them after its own backward pass.

        On a GPU this is the last known time, possibly an earlier step's: reading it would wait.
        """


class Observers(ExchangeObserver):
    """Several observers as one, called in the order given."""

    def __init__(self, observers: Sequence[ExchangeObserver]) -> None:
        self._observers = tuple(observers)

    def step_begun(self, step: int) -> None:
        for observer in self._observers:
            observer.step_begun(step)

    def sent(self, bucket: int) -> None:
        for observer in self._observers:
            observer.sent(bucket)

    def begun(self, bucket: int) -> None:
        for observer in self._observers:
            observer.begun(bucket)

    def ended(self, bucket: int) -> None:
        for observer in self._observers:
            observer.ended(bucket)

    def step_ended(self, exposed_s: float) -> None:
        for observer in self._observers:
            observer.step_ended(exposed_s)


@dataclass(frozen=True)
class RankProgress:
    """Of the exchange: the step (from 0) and how many buckets it has begun and ended. Of the group:
    how many collectives this rank has entered between steps (`calls`), and the one that it is in
    (`call`)."""

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
        """Whether this rank needs others to go on."""
        return self.in_exchange or bool(self.call)

    @property
    def doing(self) -> str:
        """For messages, such as `in bucket 3 of step 12`."""
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
        """Raises ParseError for a text that no rank has written."""
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
    """This rank's progress. Threads may write and read at once. Every step writes it many times, and a
    background thread reads it now and then, so writing is what has to be fast."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: dict[str, Any] = asdict(RankProgress())

    @property
    def progress(self) -> RankProgress:
        with self._lock:
            return RankProgress(**self._now)

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
        """Within a collective of the group. After one that fails the rank ends, and `call` stays."""
        now = self._now
        # Inside a step ranks may differ, where one replays a CUDA graph; there buckets are counted.
        self._update(calls=now["calls"] + (not now["computes"]), call=call)
        yield
        self._update(call="")


@dataclass(frozen=True)
class BucketInfo:
    """A bucket of the plan, for messages and traces: the bytes that travel, and how."""

    bytes: int
    algorithm: str
    tensors: tuple[str, ...]
    wire: str = "auto"

    def label(self, number: int) -> str:
        """`bucket 3, 16.2 MiB, ring`."""
        return f"bucket {number}, {format_bytes(self.bytes)}, {self.algorithm}"

    def describe(self, number: int, of: int) -> str:
        first = ", ".join(self.tensors[:_NAMED_TENSORS])
        more = len(self.tensors) - _NAMED_TENSORS
        rest = f" and {more} more" if more > 0 else ""
        return (
            f"bucket {number} of {of} ({format_bytes(self.bytes)}, {self.algorithm}: {first}{rest})"
        )
