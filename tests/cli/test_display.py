from __future__ import annotations

import io

from rich.console import Console

from paceline.core.events import (
    CheckpointEvent,
    CorruptEvent,
    EvalEvent,
    NoteEvent,
    StartEvent,
    StepEvent,
    StopEvent,
)
from paceline.train.display import LiveDisplay, PlainDisplay, create_display, describe_event

START = StartEvent(0, 4, 2.0, 1, 16, chosen={"device": "cpu"})


def step(number: int, *, skipped: bool = False) -> StepEvent:
    return StepEvent(number, number / 2, 1.25, 0.1, 1000.0 * number, 0.1, 0.0, skipped)


EVENTS = [
    START, step(1), step(2), EvalEvent(2, 1.0, 87.5, 99.0, 0.5, 2000, 0.7),
    CheckpointEvent(2, "runs/x/checkpoints/step-00000002.pt", 0.1, True),
    CorruptEvent(3, "train-0000.tar:[7].png", "cut short"), step(3, skipped=True), step(4),
    NoteEvent("a note"), StopEvent(4, "target"),
]  # fmt: skip


def plain(interval: int) -> list[str]:
    output = io.StringIO()
    display = PlainDisplay(Console(file=output, width=40), interval)
    for event in EVENTS:
        display.on_event(event)
    display.close()
    return output.getvalue().splitlines()


def test_names_of_samples_cannot_control_the_terminal() -> None:
    evil = CorruptEvent(3, "a\x1b]0;title\x07\nb.png", "cut\x1b[31m short")
    start = StartEvent(0, 4, 2.0, 1, 16, chosen={"data": "\x1b[2Jdir\x1b"})
    for event in (NoteEvent("class \x9b2J"), evil, start):
        text = describe_event(event)
        assert text
        assert all(line.isprintable() for line in text.split("\n"))


def test_plain_lines_come_at_the_interval_and_unwrapped() -> None:
    lines = plain(2)
    assert "step 2/4 epoch 1.00 loss 1.2500 lr 0.1 1,500 images/s" in lines
    assert not any(line.startswith("step 1/") for line in lines)
    assert any(line.startswith("step 3/4") and "SKIPPED" in line for line in lines)
    for words in (
        "  device: cpu",
        "step-00000002.pt (best so far)",
        "train-0000.tar:[7].png",
        "target",
    ):
        assert sum(words in line for line in lines) == 1, words
    assert lines.count("a note") == 1
    assert any(line.startswith("step 4/4") for line in plain(1000)), "the last step is always shown"


def test_a_terminal_gets_the_live_display() -> None:
    assert isinstance(create_display(Console(file=io.StringIO()), 1), PlainDisplay)
    on_terminal = create_display(Console(file=io.StringIO(), force_terminal=True), 1)
    on_terminal.close()
    assert isinstance(on_terminal, LiveDisplay)
