"""Events go through `metrics.jsonl` and come back, whatever a kill or a divergence left there."""

import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from paceline.core.errors import DataError
from paceline.core.events import (
    CheckpointEvent,
    CorruptEvent,
    EvalEvent,
    Event,
    JsonlWriter,
    NoteEvent,
    StartEvent,
    StepEvent,
    StopEvent,
    read_events,
)

START = StartEvent(0, 10, 5.0, 1, 32, chosen={"backend": "gloo"})
EVENTS = [
    START,
    StepEvent(1, 0.2, 2.3, 0.1, 1430.5, 0.02, 0.001),
    EvalEvent(5, 1.0, 88.5, 99.5, 0.4, 2000, 1.5),
    CheckpointEvent(5, "checkpoints/step-5.pt", 0.1, best=True),
    CorruptEvent(6, "a/ü.png", "not an image"),
    NoteEvent("threads = 2"),
    StopEvent(10, "finished"),
]


def step(number: int, loss: float = 1.0) -> StepEvent:
    return StepEvent(number, 0.0, loss, 0.1, 100.0, 0.1, 0.0)


def write(path: Path, *events: Event) -> None:
    writer = JsonlWriter(path)
    for event in events:
        writer.on_event(event)
    writer.close()


def test_round_trip_keeps_every_field_and_adds_kind_and_time(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "metrics.jsonl"
    before = time.time()
    write(path, *EVENTS)
    records = list(read_events(path))
    assert [record.pop("event") for record in records] == [event.kind for event in EVENTS]
    for record, event in zip(records, EVENTS, strict=True):
        assert before - 1 <= record.pop("time") <= time.time() + 1
        assert {"event": event.kind, **record} == event.to_dict()


def test_each_record_is_one_line_that_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.on_event(NoteEvent("two\nlines\u2028and a third"))
    text = path.read_bytes()
    writer.close()
    assert text.count(b"\n") == 1
    assert text.endswith(b"\n")
    assert next(read_events(path))["text"] == "two\nlines\u2028and a third"


def cut_last_line(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def extend_with_zeros(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 5)


def replace_by_empty(path: Path) -> None:
    other = path.with_suffix(".other")
    other.write_text("")
    other.replace(path)


DAMAGE = {
    "deleted": (Path.unlink, [0, 2]),
    "emptied": (lambda path: os.truncate(path, 0), [0, 2]),
    "replaced": (replace_by_empty, [0, 2]),
    "cut": (cut_last_line, [0, 2]),
    "extended": (extend_with_zeros, [0, 1, 2]),
}


@pytest.mark.parametrize(("damage", "left"), DAMAGE.values(), ids=DAMAGE)
def test_a_file_that_changes_between_two_events(
    tmp_path: Path, damage: Callable[[Path], object], left: list[int]
) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.on_event(START)
    writer.on_event(step(1))
    damage(path)
    writer.on_event(step(2))
    writer.close()
    assert [record["step"] for record in read_events(path)] == left


def test_a_file_that_cannot_be_written_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    writer = JsonlWriter(path)
    with pytest.raises(OSError, match="No such device"):
        writer.on_event(step(1))
    path.unlink()
    writer.on_event(step(2))
    writer.close()
    assert [record["step"] for record in read_events(path)] == [2]


@dataclass(frozen=True)
class NestedEvent(Event):
    kind: ClassVar[str] = "nested"
    rows: tuple[float, ...]
    table: dict[str, list[float]]


def test_what_json_cannot_hold_becomes_null_also_in_lists_and_tables(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, NestedEvent((1.0, math.nan, -math.inf), {"a": [math.inf, 2.0]}), step(1, math.nan))
    assert not {"NaN", "Infinity"} & set(re.findall(r"\w+", path.read_text()))
    record, plain = read_events(path)
    assert plain["loss"] is None
    assert record["rows"] == [1.0, None, None]
    assert record["table"] == {"a": [None, 2.0]}


def test_a_last_line_cut_short_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1), step(2))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        assert [record["step"] for record in read_events(path)] == [1]


@pytest.mark.parametrize("cut_bytes", [1, 20, 100_000])
def test_a_resumed_run_does_not_write_onto_a_cut_line(tmp_path: Path, cut_bytes: int) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1), NoteEvent("x" * 200_000))
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - cut_bytes)
    write(path, step(2))
    assert [record["step"] for record in read_events(path)] == [1, 2]


@pytest.mark.parametrize(
    "line", [b"{broken", b"", b"[1, 2]", b"3", b'{"step": 1}', b'{"event": 4}', b"\xff\xfe"]
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1))
    with path.open("ab") as file:
        file.write(line + b"\n")
    records = read_events(path)
    assert next(records)["step"] == 1
    with pytest.raises(DataError, match=r"metrics\.jsonl: line 2 is not an event record; ") as info:
        next(records)
    assert "\n" not in str(info.value)
