"""A run folder is read as it stands, superseded steps vanish, and what is broken is named."""

import json
import math
import os
from pathlib import Path

import pytest

from paceline.core.errors import DataError
from paceline.core.events import (
    CheckpointEvent,
    CorruptEvent,
    Event,
    NoteEvent,
    StepEvent,
    StopEvent,
)
from paceline.report.run_files import RunFiles, finite, live, whole
from report.conftest import MakeRun
from report.made_up_runs import CONFIG, SUMMARY, evaluation, start, step


def fails(path: Path) -> str:
    with pytest.raises(DataError) as info:
        RunFiles.read(path)
    text = str(info.value)
    assert len(text.splitlines()) == 1
    assert info.value.remedy
    return text


def steps(run: RunFiles, rank: int = 0) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in run.of_kind("step", rank)]


def records(*events: Event) -> list[dict[str, object]]:
    return [event.to_dict() for event in events]


def test_a_finished_run(finished_run: Path) -> None:
    run = RunFiles.read(finished_run)
    assert run.path == finished_run
    assert run.summary == SUMMARY
    assert run.config == CONFIG
    assert list(run.ranks) == [0]
    assert run.events == run.ranks[0]
    assert len(run.of_kind("step")) == 800
    assert [record["step"] for record in run.of_kind("eval")] == list(range(100, 801, 100))
    assert run.resumes == []


def test_an_unfinished_run_has_no_summary_and_may_have_no_config(make_run: MakeRun) -> None:
    run = RunFiles.read(make_run([start(), step(1)], config=None))
    assert run.summary is None
    assert run.config == {}


def test_a_run_killed_before_its_first_record(make_run: MakeRun) -> None:
    assert RunFiles.read(make_run([])).events == ()


def test_other_ranks_are_read_by_their_number(make_run: MakeRun) -> None:
    folder = make_run([start()], ranks={10: [step(1, 10.0)], 2: [step(1, 2.0)]})
    (folder / "metrics.rankx.jsonl").write_text("not ours\n", "utf-8")
    run = RunFiles.read(folder)
    assert list(run.ranks) == [0, 2, 10]
    assert list(RunFiles.read(folder, first_rank_only=True).ranks) == [0]
    assert steps(run, 10) == [(1, 10.0)]


def test_steps_done_again_after_a_resume_supersede_the_old_ones(make_run: MakeRun) -> None:
    old = [start(), *(step(n, 1.0) for n in range(1, 8)), evaluation(5, 50.0), evaluation(7, 60.0)]
    again = [start(5, resumed_from="checkpoints/step-5.pt"), step(6, 2.0)]
    run = RunFiles.read(make_run([*old, *again], ranks={1: [*old, *again]}))
    expected = [*((n, 1.0) for n in range(1, 6)), (6, 2.0)]
    assert steps(run) == expected
    assert steps(run, 1) == expected
    assert [record["top1"] for record in run.of_kind("eval")] == [50.0]
    assert [record["step"] for record in run.resumes] == [5]


def test_every_kind_with_a_step_is_superseded_but_starts_and_notes_stay() -> None:
    before = records(
        start(0),
        start(8),
        CheckpointEvent(9, "a", 0.1),
        CorruptEvent(9, "x", "bad"),
        StopEvent(9, "signal"),
        NoteEvent("stays"),
    )
    kept = live([*before, *records(start(4))])
    assert [record["event"] for record in kept] == ["start", "start", "note", "start"]


def test_of_one_step_the_last_record_counts_but_corrupt_samples_all_do() -> None:
    kept = live(
        records(
            step(1, 1.0),
            CorruptEvent(1, "a", "bad"),
            CorruptEvent(1, "b", "bad"),
            evaluation(1, 10.0),
            step(1, 2.0),
            evaluation(1, 20.0),
        )
    )
    assert [record.get("loss") for record in kept if record["event"] == "step"] == [2.0]
    assert [record.get("top1") for record in kept if record["event"] == "eval"] == [20.0]
    assert [record.get("name") for record in kept if record["event"] == "corrupt"] == ["a", "b"]


def test_a_first_start_from_another_run_is_a_resume(make_run: MakeRun) -> None:
    run = RunFiles.read(make_run([start(50, resumed_from="elsewhere/step-50.pt")]))
    assert [record["step"] for record in run.resumes] == [50]


def test_the_summary_of_a_run_taken_up_again_is_of_the_past(make_run: MakeRun) -> None:
    events = [start(), step(1), StopEvent(1, "finished"), start(1), step(2)]
    assert RunFiles.read(make_run(events, summary=SUMMARY)).summary is None
    ended = [*events, StopEvent(2, "finished")]
    assert RunFiles.read(make_run(ended, summary=SUMMARY, name="ended")).summary == SUMMARY


def test_a_cut_last_line_is_passed_over(make_run: MakeRun) -> None:
    folder = make_run([start(), step(1), step(2)])
    file = folder / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    assert steps(RunFiles.read(folder)) == [(1, 1.0)]


def test_kinds_from_a_later_version_do_no_harm(make_run: MakeRun) -> None:
    folder = make_run([start(), step(1)])
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"event": "from the future"}\n')
    assert len(RunFiles.read(folder).events) == 3


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert "run folder" in fails(tmp_path / "nowhere")
    assert "nowhere does not exist" in fails(tmp_path / "nowhere")


def test_a_file_is_no_run_folder(finished_run: Path) -> None:
    assert "is not a folder" in fails(finished_run / "metrics.jsonl")


def test_a_folder_of_runs_names_the_newest(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "empty is not a run folder: it has no metrics.jsonl" in fails(tmp_path / "empty")
    for place, name in enumerate(("b", "c", "a")):
        folder = make_run([start()], name=name)
        os.utime(folder / "metrics.jsonl", (place, place))
    assert fails(tmp_path).endswith(f"did you mean {tmp_path / 'a'}?")


def test_a_broken_line_is_named(finished_run: Path) -> None:
    file = finished_run / "metrics.jsonl"
    lines = file.read_text("utf-8").splitlines(keepends=True)
    lines[4] = "{broken\n"
    file.write_text("".join(lines), "utf-8")
    assert "metrics.jsonl: line 5 is not an event record" in fails(finished_run)


@pytest.mark.parametrize(
    "line", ['{"event": "step"}', '{"event": "step", "step": "7"}', '{"event": "x", "step": true}']
)
def test_a_record_without_a_proper_step_is_named(make_run: MakeRun, line: str) -> None:
    folder = make_run([start()])
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    assert "line 2 has no whole number as its step" in fails(folder)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("summary.json", b"{", "is not JSON"),
        ("summary.json", b"\xff\xff", "is not JSON"),
        ("summary.json", b"[]", "holds no table"),
        ("config.toml", b"a = = 1", "is not TOML"),
        ("config.toml", b"\xff", "is not TOML"),
    ],
)
def test_a_broken_file_is_named(
    finished_run: Path, name: str, content: bytes, problem: str
) -> None:
    (finished_run / name).write_bytes(content)
    assert f"{name} {problem}" in fails(finished_run)


def test_a_file_that_cannot_be_read_is_named(finished_run: Path) -> None:
    (finished_run / "summary.json").unlink()
    (finished_run / "summary.json").mkdir()
    assert "summary.json cannot be read: " in fails(finished_run)


def test_finite_takes_numbers_alone() -> None:
    record = {"a": 1, "b": 2.5, "c": None, "d": "3", "e": True, "f": math.nan, "g": math.inf}
    assert [finite(record, name) for name in "abcdefgh"] == [1.0, 2.5, *[None] * 6]
    assert [whole(record, name) for name in "abcd"] == [1, 2, None, None]


def test_nan_comes_back_as_none_from_a_real_writer(make_run: MakeRun) -> None:
    folder = make_run([start(), step(1, math.nan)])
    assert json.loads((folder / "metrics.jsonl").read_text("utf-8").splitlines()[1])["loss"] is None
    run = RunFiles.read(folder)
    assert finite(run.of_kind(StepEvent.kind)[0], "loss") is None
