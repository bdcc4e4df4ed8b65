from __future__ import annotations

import io

from rich.console import Console

from paceline.cli.display import LiveDisplay, PlainDisplay, create_display, notable
from paceline.core.events import (
    CheckpointEvent,
    CorruptEvent,
    EvalEvent,
    NoteEvent,
    StartEvent,
    StepEvent,
    StopEvent,
)

START = StartEvent(0, 4, 2.0, 1, 16, chosen={"device": "cpu"})


def step(number: int, *, skipped: bool = False) -> StepEvent:
    return StepEvent(number, number / 2, 1.25, 0.1, 1000.0 * number, 0.1, 0.0, skipped)


EVENTS = [
    START,
    step(1),
    step(2),
    EvalEvent(2, 1.0, 87.5, 99.0, 0.5, 2000, 0.7),
    CheckpointEvent(2, "runs/x/checkpoints/step-00000002.pt", 0.1, True),
    CorruptEvent(3, "train-0000.tar:[7].png", "cut short"),
    step(3, skipped=True),
    step(4),
    NoteEvent("a note"),
    StopEvent(4, "target"),
]


def plain(interval: int) -> str:
    output = io.StringIO()
    display = PlainDisplay(Console(file=output, width=40), interval)
    for event in EVENTS:
        display.on_event(event)
    display.close()
    return output.getvalue()


def test_names_of_samples_reach_no_terminal_as_they_are() -> None:
    """Neither the display of a pipe nor the one of a terminal passes escape sequences on."""
    evil = CorruptEvent(3, "a\x1b]0;title\x07\nb.png", "cut\x1b[31m short")
    for kind in (NoteEvent("class \x9b2J"), evil):
        text = notable(kind)
        assert text is not None
        assert text.isprintable()
    chosen = notable(StartEvent(0, 4, 2.0, 1, 16, chosen={"data": "\x1b[2Jdir\x1b"}))
    assert chosen is not None
    assert all(line.isprintable() for line in chosen.split("\n"))


def test_plain_lines_come_at_the_interval_and_whole() -> None:
    lines = plain(2).splitlines()
    assert "step 2/4 epoch 1.00 loss 1.2500 lr 0.1 1,500 images/s" in lines
    assert not any(line.startswith("step 1/") for line in lines)
    assert any(line.startswith("step 3/4") and "SKIPPED" in line for line in lines)
    assert "  device: cpu" in lines
    assert "saved runs/x/checkpoints/step-00000002.pt (best so far)" in lines
    assert "corrupt, replaced by its successor: train-0000.tar:[7].png (cut short)" in lines
    assert "stopped after step 4: target" in lines
    assert lines.count("a note") == 1


def test_the_last_step_is_always_shown() -> None:
    assert any(line.startswith("step 4/4") for line in plain(1000).splitlines())


def test_the_live_line_shows_the_same_numbers() -> None:
    output = io.StringIO()
    display = LiveDisplay(Console(file=output, force_terminal=True, width=160))
    for event in EVENTS:
        display.on_event(event)
    display.close()
    text = output.getvalue()
    assert "4/4" in text
    assert "images/s" in text
    assert "top-1 87.50 %" in text
    assert "[7]" in text  # names are not markup


def test_the_live_line_is_whole_on_a_terminal_of_80_columns() -> None:
    output = io.StringIO()
    display = LiveDisplay(Console(file=output, force_terminal=True, width=80))
    display.on_event(StartEvent(0, 112_590, 1251.0, 8, 1024))
    display.on_event(StepEvent(100_000, 79.94, 1.2345, 0.01234, 23_456.0, 0.1, 0.0))
    display.close()
    assert "…" not in output.getvalue()


def test_a_step_that_waits_for_its_input_says_for_what() -> None:
    causes = {"read": 0.01, "decode": 0.03}
    waiting = StepEvent(1, 0.5, 1.0, 0.1, 100.0, 0.1, 0.04, False, 1.0, 0.0, 0.04, causes)
    hardly = StepEvent(2, 1.0, 1.0, 0.1, 100.0, 0.1, 0.0, False, 1.0, 0.0, 0.004, {"read": 0.004})
    output = io.StringIO()
    display = PlainDisplay(Console(file=output), 1)
    for event in (START, waiting, hardly):
        display.on_event(event)
    first, second = output.getvalue().splitlines()[-2:]
    assert first.endswith("100 images/s input: decode")
    assert second.endswith("100 images/s")


def test_a_terminal_gets_the_live_display() -> None:
    assert isinstance(create_display(Console(file=io.StringIO()), 1), PlainDisplay)
    live = create_display(Console(file=io.StringIO(), force_terminal=True), 1)
    live.close()
    assert isinstance(live, LiveDisplay)
