"""A run folder is read as it is, superseded steps are left out, and damaged files are named."""

import os
from pathlib import Path

import pytest

from paceline.core.errors import DataError
from paceline.core.events import CheckpointEvent, CorruptEvent, NoteEvent, StopEvent
from paceline.report import RunFiles
from report.conftest import MakeRun
from report.made_up_runs import CONFIG, SUMMARY, evaluation, start, step


def steps(run: RunFiles, rank: int = 0) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in run.of_kind("step", rank)]


def append(folder: Path, *lines: str) -> None:
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


def fails(path: Path) -> DataError:
    with pytest.raises(DataError) as info:
        RunFiles.read(path)
    assert len(str(info.value).splitlines()) == 1
    assert info.value.remedy
    return info.value


def test_a_finished_run(finished_run: Path) -> None:
    run = RunFiles.read(finished_run)
    assert (run.path, run.summary, run.config) == (finished_run, SUMMARY, CONFIG)
    assert list(run.ranks) == [0]
    assert len(run.of_kind("step")) == 800
    assert [record["step"] for record in run.of_kind("eval")] == list(range(100, 801, 100))
    assert run.resumes == []


def test_an_unfinished_run_has_no_summary_and_may_have_no_config(make_run: MakeRun) -> None:
    run = RunFiles.read(make_run([start(), step(1)], config=None))
    assert (run.summary, run.config) == (None, {})
    assert RunFiles.read(make_run([], name="killed before its first record")).events == ()


def test_other_ranks_are_read_by_their_number(make_run: MakeRun) -> None:
    folder = make_run([start()], ranks={10: [step(1, 10.0)], 2: [step(1, 2.0)]})
    (folder / "metrics.rankx.jsonl").write_text("not ours\n", "utf-8")
    run = RunFiles.read(folder)
    assert list(run.ranks) == [0, 2, 10]
    assert list(RunFiles.read(folder, first_rank_only=True).ranks) == [0]
    assert steps(run, 10) == [(1, 10.0)]


def test_repeated_steps_after_a_resume_supersede_the_old_ones(make_run: MakeRun) -> None:
    """Every kind of record with a step; starts and notes stay."""
    old = [
        start(), *(step(n, 1.0) for n in range(1, 8)), evaluation(5, 50.0), evaluation(7, 60.0),
        CheckpointEvent(7, "a", 0.1), CorruptEvent(7, "x", "bad"), StopEvent(7, "signal"),
        NoteEvent("stays"),
    ]  # fmt: skip
    again = [start(5, resumed_from="checkpoints/step-5.pt"), step(6, 2.0)]
    run = RunFiles.read(make_run([*old, *again], ranks={1: [*old, *again]}))
    assert steps(run) == steps(run, 1) == [*((n, 1.0) for n in range(1, 6)), (6, 2.0)]
    assert [record["top1"] for record in run.of_kind("eval")] == [50.0]
    assert [record["step"] for record in run.resumes] == [5]
    others = [record["event"] for record in run.events if record["event"] not in ("step", "eval")]
    assert others == ["start", "note", "start"]


def test_of_one_step_the_last_record_counts_but_all_corrupt_samples_do(make_run: MakeRun) -> None:
    events = [
        step(1, 1.0), CorruptEvent(1, "a", "bad"), CorruptEvent(1, "b", "bad"),
        evaluation(1, 10.0), step(1, 2.0), evaluation(1, 20.0),
    ]  # fmt: skip
    run = RunFiles.read(make_run(events))
    assert run.values("step", "loss") == [2.0]
    assert run.values("eval", "top1") == [20.0]
    assert [record["name"] for record in run.of_kind("corrupt")] == ["a", "b"]


def test_a_first_start_from_another_run_is_a_resume(make_run: MakeRun) -> None:
    run = RunFiles.read(make_run([start(50, resumed_from="elsewhere/step-50.pt")]))
    assert [record["step"] for record in run.resumes] == [50]


def test_the_summary_of_a_run_resumed_after_its_end_is_out_of_date(make_run: MakeRun) -> None:
    events = [start(), step(1), StopEvent(1, "finished"), start(1), step(2)]
    assert RunFiles.read(make_run(events, summary=SUMMARY)).summary is None
    ended = [*events, StopEvent(2, "finished")]
    assert RunFiles.read(make_run(ended, summary=SUMMARY, name="ended")).summary == SUMMARY


def test_a_cut_last_line_and_kinds_of_a_later_version_do_no_harm(make_run: MakeRun) -> None:
    folder = make_run([start(), step(1), step(2)])
    file = folder / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    assert steps(RunFiles.read(folder)) == [(1, 1.0)]
    other = make_run([start(), step(1)], name="later")
    append(other, '{"event": "from the future"}')
    assert len(RunFiles.read(other).events) == 3


def test_values_that_are_no_numbers_are_left_out(make_run: MakeRun) -> None:
    folder = make_run([start(), step(1, 2.5)])
    values = ("null", '"3"', "true", "1e200", "-1e-200")
    for number, value in enumerate(values, start=2):
        append(folder, f'{{"event": "step", "step": {number}, "loss": {value}, "epoch": 0.5}}')
    run = RunFiles.read(folder)
    assert run.values("step", "loss") == [2.5, 0.0]
    assert [tuple(point) for point in run.points("step", "loss")] == [(1, 0.01, 2.5), (6, 0.5, 0.0)]
    assert run.points("eval", "no such field") == []


def test_what_is_no_run_folder_is_named(make_run: MakeRun, tmp_path: Path) -> None:
    assert "nowhere does not exist" in fails(tmp_path / "nowhere").cause
    (tmp_path / "file").touch()
    assert "file is not a folder" in fails(tmp_path / "file").cause
    (tmp_path / "empty").mkdir()
    assert "empty is not a run folder" in fails(tmp_path / "empty").cause
    for place, name in enumerate(("b", "c", "a")):
        folder = make_run([start()], name=name)
        os.utime(folder / "metrics.jsonl", (place, place))
    assert str(tmp_path / "a") in fails(tmp_path).remedy, "the newest run inside"


@pytest.mark.parametrize(
    "line",
    [
        "{broken",
        '{"event": "step"}',
        '{"event": "step", "step": "7"}',
        '{"event": "x", "step": true}',
    ],
)
def test_a_damaged_record_is_named_by_its_line(make_run: MakeRun, line: str) -> None:
    folder = make_run([start()])
    append(folder, line)
    assert "metrics.jsonl: line 2" in fails(folder).cause


@pytest.mark.parametrize(
    ("name", "content"),
    [("summary.json", b"{"), ("summary.json", b"\xff\xff"), ("summary.json", b"[]"),
     ("config.toml", b"a = = 1"), ("config.toml", b"\xff"), ("summary.json", None)],
)  # fmt: skip
def test_a_damaged_or_unreadable_file_is_named(
    finished_run: Path, name: str, content: bytes | None
) -> None:
    (finished_run / name).unlink()
    if content is None:
        (finished_run / name).mkdir()
    else:
        (finished_run / name).write_bytes(content)
    assert name in fails(finished_run).cause
