"""Run folders that change while they are read: they grow, are cut, vanish, and hold foreign things."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from paceline.core.events import Event
from paceline.report.live_run import LiveRun
from report.conftest import MakeRun
from report.made_up_runs import BEGAN, append_text, evaluation, start, step


def line(event: Event) -> str:
    return json.dumps({**event.to_dict(), "time": BEGAN}) + "\n"


def recorded(run: LiveRun, rank: int = 0) -> list[int]:
    """The steps that a look at the folder finds."""
    run.refresh()
    assert run.files is not None, run.problem
    return run.files.steps(rank).number.tolist()


def test_a_folder_that_grows(make_run: MakeRun) -> None:
    folder = make_run([start(), step(1)])
    run = LiveRun(folder)
    assert recorded(run) == [1]
    version = run.version
    run.refresh()
    assert run.version == version, "nothing new, nothing to render"
    half = line(step(3))
    append_text(folder, line(step(2)) + half[:20])
    assert recorded(run) == [1, 2]
    assert run.version > version
    append_text(folder, half[20:])
    append_text(folder, line(start()) + line(step(7)), "metrics.rank1.jsonl")
    assert recorded(run) == [1, 2, 3]
    assert recorded(run, 1) == [7]
    # Resumed from step 2: what came after it is superseded.
    append_text(folder, line(start(2)) + line(step(3)) + line(evaluation(3)))
    assert recorded(run) == [1, 2, 3]
    assert run.files.resumes
    version = run.version
    (folder / "summary.json").write_text('{"top1": 50.0}')
    run.refresh()
    assert run.version > version


def test_a_look_reads_only_what_was_appended(make_run: MakeRun) -> None:
    folder = make_run([start(), *(step(n) for n in range(1, 9))])
    run = LiveRun(folder)
    run.refresh()
    file = folder / "metrics.jsonl"
    with file.open("rb+") as known:  # what has been read is not looked at again
        known.write(b"?" * file.stat().st_size)
    append_text(folder, "\n" + line(step(9))[:30])
    run.refresh()
    assert "line 10" in run.problem, (
        "an empty line is no record; those before it are not read again"
    )
    shutil.rmtree(folder)
    folder = make_run([start(), *(step(n) for n in range(1, 9))])
    run.refresh()
    with file.open("rb+") as known:
        known.write(b"?" * file.stat().st_size)
    append_text(folder, line(step(9)))
    assert recorded(run) == list(range(1, 10))


def test_a_file_that_is_cut_short_or_replaced_is_read_again(make_run: MakeRun) -> None:
    folder = make_run([start(), *(step(n) for n in range(1, 9))])
    run = LiveRun(folder)
    run.refresh()
    content = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(content[:4]))
    assert recorded(run) == [1, 2, 3]
    other = folder / "other"
    other.write_text("".join([content[0], content[-1], *content[2:8]]))
    other.replace(folder / "metrics.jsonl")
    assert recorded(run) == list(range(2, 9))


def test_a_folder_that_appears_vanishes_and_returns(make_run: MakeRun, tmp_path: Path) -> None:
    run = LiveRun(tmp_path / "run")
    run.refresh()
    assert run.files is None
    assert "does not exist" in run.problem
    folder = make_run([start(), step(1)])
    assert recorded(run) == [1]
    kept = tmp_path / "kept"
    shutil.move(folder, kept)
    run.refresh()
    run.refresh()
    assert run.files is None
    assert "does not exist" in run.problem
    folder.mkdir()
    run.refresh()
    assert "no metrics.jsonl yet" in run.problem
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    assert recorded(run) == [1]


FOREIGN = [
    '{"name": "package", "version": 1}', "[1, 2]", '{"event": "step", "step": "x"}', "\udcff",
    "[" * 9999,
]  # fmt: skip


@pytest.mark.parametrize("foreign", FOREIGN)
def test_foreign_lines_are_named_and_the_run_comes_back(make_run: MakeRun, foreign: str) -> None:
    folder = make_run([start(), step(1)])
    good = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(
        good + foreign.encode("utf-8", "surrogateescape") + b"\n"
    )
    run = LiveRun(folder)
    run.refresh()
    assert run.files is None
    assert "line 3" in run.problem
    version = run.version
    run.refresh()
    assert run.version == version
    (folder / "metrics.jsonl").write_bytes(good)
    assert recorded(run) == [1]
