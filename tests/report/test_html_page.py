"""The page: whole, self-contained, small, and harmless whatever the run's files say."""

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from paceline.core.events import CheckpointEvent, CorruptEvent, NoteEvent, StopEvent
from paceline.report.run_files import RunFiles
from paceline.report.run_page import render
from report.conftest import MakeRun
from report.made_up_runs import (
    CONFIG,
    SUMMARY,
    evaluation,
    finished_events,
    start,
    step,
)

VOID = {"meta", "path", "circle", "rect", "polyline"}


class Page(HTMLParser):
    """Reads a page, checking that each element that opens also closes, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += f"{data}\n"


def page_of(folder: Path) -> Page:
    return checked(render(RunFiles.read(folder)))


def checked(text: str) -> Page:
    """The page, which is small, well-formed, and neither runs nor loads anything."""
    assert len(text.encode("utf-8")) < 1_000_000
    page = Page(text)
    assert "script" not in page.tags
    assert {"link", "img", "iframe", "object", "base"}.isdisjoint(page.tags)
    for name, value in page.attributes:
        assert name not in ("src", "href", "srcset", "action", "style")
        assert not name.startswith("on")
        assert "//" not in (value or "")
    assert not re.search(r"@import|url\(|https?://", text)
    return page


def test_a_finished_run(finished_run: Path) -> None:
    page = page_of(finished_run)
    assert page.text.count("quickstart: 90.3 % top-1 in 101 s, 1,430 images/s on 1 rank") == 1
    assert "quickstart: 90.3\u00a0% top-1 in 101\u00a0s" in page.text
    assert page.tags.count("svg") == 4
    for word in (
        "finished\n",
        "smallnet",
        "Accuracy",
        "Loss",
        "Learning rate",
        "Throughput",
        "Evaluations",
        "checkpoints/step-800.pt",
        "Configuration",
        "momentum",
        "Environment",
        "2.13.0+cpu",
        "threads = 2 (two cores)",
        "9f9f9f",
    ):
        assert word in page.text, word
    assert "Incidents" not in page.text


def test_the_page_is_a_document_for_any_screen(finished_run: Path) -> None:
    text = render(RunFiles.read(finished_run))
    assert text.startswith("<!doctype html>\n")
    assert '<html lang="en">' in text
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


@pytest.mark.parametrize("events", [[], [start()]])
def test_a_run_without_a_step(make_run: MakeRun, events: list[StopEvent]) -> None:
    page = page_of(make_run(events, config=None))
    assert "unfinished, no step recorded yet" in page.text
    assert page.text.count("nothing recorded") == 4
    assert "config.toml is not there" in page.text


def test_an_unfinished_run_shows_what_there_is(make_run: MakeRun) -> None:
    page = page_of(make_run(finished_events()[:300]))
    assert "unfinished\n" in page.text
    assert "at step 294 of 800" in page.text
    assert "Chosen automatically" in page.text


def test_one_evaluation_only(make_run: MakeRun) -> None:
    page = page_of(make_run([start(), step(1), evaluation(1, 42.0), StopEvent(1, "finished")]))
    assert "42.00 %" in page.text
    assert "epoch 0.01" not in page.text
    assert "step 1: top-1 42.00 %" in page.text


def test_a_loss_that_is_not_a_number(make_run: MakeRun) -> None:
    events = [start(), *(step(n, math.nan, skipped=n > 3) for n in range(1, 6))]
    page = page_of(make_run(events))
    assert "steps without a finite loss" in page.text
    assert "Skipped steps" in page.text
    assert page.text.count("nothing recorded") == 2  # no loss, no accuracy
    assert "nan" not in page.text.lower()


def test_a_resumed_run_shows_no_superseded_step(make_run: MakeRun) -> None:
    before = [start(), *(step(n) for n in range(1, 31)), evaluation(30, 11.11)]
    after = [start(20, resumed_from="checkpoints/step-20.pt"), step(21), evaluation(21, 33.33)]
    page = page_of(make_run([*before, *after]))
    assert "33.33 %" in page.text
    assert "11.11 %" not in page.text
    assert "step 30" not in page.text
    assert "checkpoints/step-20.pt" in page.text
    assert "resumed at step 20" in page.text


def test_fifty_thousand_steps_stay_small(make_run: MakeRun) -> None:
    events = finished_events(50_000)
    page = page_of(make_run(events, summary={**SUMMARY, "steps": 50_000}))
    assert "50,000" in page.text
    longest = max(len(value or "") for name, value in page.attributes if name == "points")
    assert longest < 600 * 12


HOSTILE = "<script>alert(1)</script>\"'&\x1b\x00\ud800</title></style>"


def test_hostile_names_stay_text(make_run: MakeRun) -> None:
    events = [
        start(resumed_from=HOSTILE, chosen={HOSTILE: HOSTILE}),
        step(1),
        evaluation(1),
        NoteEvent(HOSTILE),
        CorruptEvent(1, HOSTILE, HOSTILE),
        CheckpointEvent(1, HOSTILE, 0.1),
        StopEvent(1, HOSTILE),
    ]
    summary = {
        **SUMMARY,
        "recipe": HOSTILE,
        "model": HOSTILE,
        "stopped_by": HOSTILE,
        "weights_sha256": HOSTILE,
        "versions": {HOSTILE: HOSTILE},
        "hardware": {HOSTILE: [HOSTILE]},
    }
    plain = HOSTILE.replace("\ud800", "")  # TOML cannot hold half a character
    config = {plain: {plain: [plain]}, "other": plain}
    folder = make_run(events, summary=summary, config=config, name="<b>&run")
    page = page_of(folder)
    assert "b" not in page.tags
    assert page.text.count("<script>alert(1)</script>") >= 10
    assert "\x1b" not in page.text
    render(RunFiles.read(folder)).encode("utf-8")


def test_odd_types_do_no_harm(make_run: MakeRun) -> None:
    summary = {key: ["odd", {"a": None}] for key in SUMMARY}
    folder = make_run([start(), step(1), evaluation(1)], summary=summary, config=CONFIG)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"event": "step", "step": 2, "loss": "x", "epoch": [], "time": "y"}\n')
        file.write('{"event": "corrupt", "step": 2}\n')
        file.write('{"event": "checkpoint", "step": 2}\n{"event": "note"}\n')
        file.write('{"event": "start", "step": 2, "chosen": 4, "world_size": "many"}\n')
    assert "Corrupt samples" in page_of(folder).text
