"""Every page in a real browser: desktop and phone, light and dark; pages renew themselves, fit into the
window, and nothing in a run folder becomes markup. Screenshots go to docs/images."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.events import CheckpointEvent, NoteEvent, RanksEvent, StepEvent
from paceline.report import RunFiles, render_run, write_page
from paceline.report.compare_page import render_comparison
from paceline.report.compare_runs import read_runs
from paceline.report.comparison import Comparison
from paceline.train.eval_details import thumbnail
from report.conftest import MakeRun, make_run  # noqa: F401  (a fixture)
from report.made_up_runs import (
    SUMMARY,
    append,
    evaluation,
    finished_events,
    start,
    step,
    write_ablation,
)
from watch.conftest import DESKTOP, PHONE, Browser, Serve

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
SIZES = {"desktop": DESKTOP, "phone": PHONE}
LOOKS = [(size, scheme) for size in SIZES for scheme in ("light", "dark")]
HOSTILE = (
    '<img src=x onerror="document.title=\'owned\'"></script><script>document.title="owned"</script>'
)


def fits(browser: Browser) -> None:
    """Nothing is wider than the window; tables scroll inside of it. No column is one letter wide."""
    wide = browser.run(
        "return [...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll') &&"
        " !e.closest('svg') && e.getBoundingClientRect().right > window.innerWidth + 1)"
        ".map(e => e.tagName + '.' + e.className).slice(0, 5)"
    )
    assert wide == []
    assert browser.run("return document.documentElement.scrollWidth") <= browser.run(
        "return window.innerWidth"
    )
    narrow = browser.run(
        "return [...document.querySelectorAll('td.text')].filter(e => e.innerText.length > 8 &&"
        " e.getBoundingClientRect().width < 60).map(e => e.innerText).slice(0, 5)"
    )
    assert narrow == []


def colours(browser: Browser) -> tuple[float, float]:
    """The brightness of the page and of its text, 0 to 255."""
    found = browser.run(
        "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
    )
    values = [[int(n) for n in text[text.index("(") + 1 : -1].split(",")[:3]] for text in found]
    return sum(values[0]) / 3, sum(values[1]) / 3


def check(browser: Browser, scheme: str) -> None:
    fits(browser)
    page, text = colours(browser)
    assert (page > 200 > 100 > text) if scheme == "light" else (page < 60 < 180 < text)
    assert browser.problems() == []


@pytest.fixture
def whole_run(make_run: MakeRun) -> Path:  # noqa: F811
    """A finished run with everything that a page can show."""
    draw = random.Random(0)
    started = start(
        command="paceline train cifar10-resnet18 --lr 0.4 --nproc-per-node 4", world_size=4,
        changed=["optim.lr", "run.seed"], hardware={"device": "cpu"},
    )  # fmt: skip
    waits = {"min": 0.004, "median": 0.007, "max": 0.008, "rank": 2, "others": 0.007}
    spread = {"min": 0.083, "median": 0.084, "max": 0.085, "rank": 1}
    events: list[Any] = []
    for event in finished_events()[1:]:
        if isinstance(event, StepEvent):
            events.append(replace(event, exposed_comm_s=0.007))
            events.append(RanksEvent(event.step, 4, spread, waits, {**spread, "median": 0.003}))
        else:
            events.append(event)
    folder = make_run([started, *events], summary={**SUMMARY, "world_size": 4})
    (folder / "checkpoints").mkdir()
    for name in ("step-00000700.pt", "step-00000800.pt"):
        (folder / "checkpoints" / name).write_bytes(bytes(300_000))
    shutil.copy(folder / "checkpoints/step-00000700.pt", folder / "checkpoints/best.pt")
    classes = [
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ]
    counts = [
        [a, b, 900 if a == b else draw.randrange(0, 25)] for a in range(10) for b in range(10)
    ]
    images = torch.randint(0, 255, (12, 8, 8, 3), generator=torch.Generator().manual_seed(1))
    mistakes = [
        {"label": n % 10, "predicted": (n + 3) % 10, "confidence": 0.99 - n / 50,
         "image": thumbnail(image.to(torch.uint8))}
        for n, image in enumerate(images)
    ]  # fmt: skip
    details = {"step": 800, "classes": classes, "counts": counts, "mistakes": mistakes}
    (folder / "evaluation.json").write_text(json.dumps(details))
    return folder


@pytest.mark.parametrize(("size", "scheme"), LOOKS)
def test_the_report(browser: Browser, whole_run: Path, size: str, scheme: str) -> None:
    page = write_page(
        render_run(RunFiles.read(whole_run)), whole_run / "report.html", "report.html"
    )
    browser.look(page.as_uri(), SIZES[size], scheme)
    check(browser, scheme)
    assert "T = S · N · e" in browser.run("return document.body.innerText")
    assert browser.run("return document.querySelectorAll('.gallery image').length") == 12
    browser.screenshot(f"report-{size}-{scheme}")


@pytest.mark.parametrize(("size", "scheme"), LOOKS)
def test_the_live_page(
    browser: Browser, whole_run: Path, serve: Serve, size: str, scheme: str
) -> None:
    lines = (whole_run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (whole_run / "metrics.jsonl").write_text("".join(lines[:800]))
    (whole_run / "summary.json").unlink()
    with serve([whole_run]) as url:
        browser.look(url, SIZES[size], scheme)
        browser.wait_for("document.documentElement.dataset.live === 'on'")
        browser.run("window.here = 1; document.querySelector('details').open = true")
        browser.run("window.scrollTo(0, 300)")
        append(whole_run, NoteEvent("a note that was not there"), evaluation(396, 66.66))
        append(whole_run, CheckpointEvent(396, "checkpoints/step-00000396.pt", 0.8, stall_s=0.02))
        browser.wait_for("document.body.innerText.includes('a note that was not there')")
        assert browser.run("return window.here") == 1, "without a reload"
        assert browser.run("return document.querySelector('details').open")
        assert browser.run("return window.scrollY") == 300
        text = browser.run("return document.body.innerText")
        for part in ("66.66 %", "step-00000396.pt", "bound by", "Saves", "Notes"):
            assert part in text
        browser.run("window.scrollTo(0, 0); document.querySelector('details').open = false")
        check(browser, scheme)
        browser.screenshot(f"watch-{size}-{scheme}")
    browser.wait_for("document.documentElement.dataset.live === 'lost'")
    assert "does not answer" in browser.run(
        "return getComputedStyle(document.body, '::before').content"
    )
    browser.problems()  # connections that were refused


@pytest.mark.parametrize(("size", "scheme"), LOOKS)
def test_several_runs(
    browser: Browser, whole_run: Path, make_run: MakeRun, serve: Serve, tmp_path: Path,  # noqa: F811
    size: str, scheme: str,
) -> None:  # fmt: skip
    other = make_run(finished_events()[:500], name="other")
    with serve([whole_run, other, tmp_path / "later"]) as url:
        browser.look(url, SIZES[size], scheme)
        check(browser, scheme)
        assert browser.run("return document.querySelectorAll('article').length") == 3
        browser.screenshot(f"runs-{size}-{scheme}")
        shutil.copytree(other, tmp_path / "later")
        browser.wait_for("document.querySelectorAll('article .bar').length === 3")
        browser.run("document.querySelector('article a').click()")
        browser.wait_for("document.body.innerText.includes('all runs')")


@pytest.mark.parametrize(("size", "scheme"), LOOKS)
def test_the_comparison(browser: Browser, tmp_path: Path, size: str, scheme: str) -> None:
    write_ablation(tmp_path)
    comparison = Comparison.of(read_runs([tmp_path]), [], None)
    page = write_page(render_comparison(comparison), tmp_path / "compare.html", "compare.html")
    browser.look(page.as_uri(), SIZES[size], scheme)
    check(browser, scheme)
    browser.screenshot(f"compare-{size}-{scheme}")


@pytest.mark.parametrize(("size", "scheme"), LOOKS)
def test_the_plan(browser: Browser, tmp_path: Path, size: str, scheme: str) -> None:
    page = tmp_path / "plan.html"
    made = subprocess.run(
        [sys.executable, "-m", "paceline", *PLAN, "--html", str(page)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    browser.look(page.as_uri(), SIZES[size], scheme)
    check(browser, scheme)
    browser.screenshot(f"plan-{size}-{scheme}")


PLAN = ["plan", "--gpu", "V100", "--nodes", "16"]


def test_hostile_names(browser: Browser, make_run: MakeRun, serve: Serve) -> None:  # noqa: F811
    events = [
        start(command=HOSTILE, chosen={HOSTILE: HOSTILE}, changed=["run.name"]), step(1),
        evaluation(1), NoteEvent(HOSTILE), CheckpointEvent(1, HOSTILE, 0.1),
    ]  # fmt: skip
    name = HOSTILE.replace("/", "∕")[:60]
    folder = make_run(events, config={"run": {"name": HOSTILE}}, name=name)
    mistake = {"label": 0, "predicted": 1, "confidence": 0.5, "image": HOSTILE}
    details = {
        "step": 1, "classes": [HOSTILE, "b"], "counts": [[0, 1, 3]], "mistakes": [mistake]
    }  # fmt: skip
    (folder / "evaluation.json").write_text(json.dumps(details))
    with serve([folder, folder.parent / "gone"]) as url:
        for address in (url, f"{url}run/0"):
            for size in SIZES.values():
                browser.look(address, size)
                browser.wait_for("document.documentElement.dataset.live === 'on'")
                check(browser, "light")
                assert browser.run("return document.title") != "owned"
                assert (
                    browser.run("return document.querySelectorAll('main img, main script').length")
                    == 0
                )
                assert "onerror" in browser.run("return document.body.innerText")
