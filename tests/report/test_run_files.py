"""A run folder is read as it is, superseded steps are left out, and damaged files are named."""

import os
import random
import re
from pathlib import Path

import pytest

from paceline.core.errors import DataError
from paceline.core.events import CheckpointEvent, CorruptEvent, NoteEvent, StopEvent
from paceline.report import RunFiles
from paceline.report.records import CAUSES, Record, RecordLog
from report.conftest import MakeRun
from report.made_up_runs import SUMMARY, append_text, evaluation, start, step


def steps(run: RunFiles, rank: int = 0) -> list[tuple[int, float]]:
    found = run.steps(rank)
    return list(zip(found.number.tolist(), found["loss"].tolist(), strict=True))


def fails(path: Path) -> DataError:
    with pytest.raises(DataError) as info:
        RunFiles.read(path)
    assert len(str(info.value).splitlines()) == 1
    assert info.value.remedy
    return info.value


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
    others = [record["event"] for record in run.events if record["event"] != "eval"]
    assert others == ["start", "note", "start"]


def current_by_definition(records: list[Record]) -> list[Record]:
    """Record by record: a start at step s drops the earlier records of steps after s, but starts; of one
    step the last record counts."""
    kept: list[Record] = []
    for record in records:
        if record["event"] == "start":
            kept = [old for old in kept if old["event"] == "start" or old["step"] <= record["step"]]
        kept.append(record)
    last = {(record["event"], record["step"]): n for n, record in enumerate(kept)}
    once = ("step", "eval")
    return [
        r for n, r in enumerate(kept) if r["event"] not in once or last[r["event"], r["step"]] == n
    ]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_superseded_and_how_long_it_took_is_as_defined(seed: int) -> None:
    draw = random.Random(seed)
    kinds = draw.choices(["step", "start", "eval", "corrupt"], [20, 2, 2, 1], k=draw.randint(0, 80))
    records: list[Record] = [
        {"event": kind, "step": draw.randint(0, 12), "time": float(n), "loss": float(n)}
        for n, kind in enumerate(kinds)
    ]
    log = RecordLog()
    for number, record in enumerate(records):
        log.append(record)
        if number % 7 == 0:
            log.current()  # a look at a file that grows
    found, expected = log.current(), current_by_definition(records)
    others = [record for record in expected if record["event"] != "step"]
    steps = sorted((r["step"], r["loss"]) for r in expected if r["event"] == "step")
    assert list(found.events) == others
    assert list(zip(found.steps.number, found.steps["loss"], strict=True)) == steps
    total, began, latest = 0.0, None, 0.0
    for record in expected:
        if record["event"] == "start":
            total += latest - began if began is not None else 0.0
            began = record["time"]
        latest = record["time"]
    assert found.elapsed_s() == (None if began is None else total + latest - began)


def test_a_view_stays_as_it_was_when_more_is_appended() -> None:
    log = RecordLog()
    causes = {"decode": 0.5, "<read>": 0.25}
    for number in (1, 2):
        log.append({"event": "step", "step": number, "loss": 1.0, "input_stall_causes": causes})
    before = log.current()
    log.append({"event": "step", "step": 3, "skipped": True, "input_stall_causes": {"copy": 9.0}})
    assert before.steps.number.tolist() == [1, 2]
    assert before.steps["loss"].tolist() == [1.0, 1.0]
    assert before.steps.sums(CAUSES) == {"decode": 1.0, "<read>": 0.5}
    after = log.current().steps
    assert after.skipped.tolist() == [False, False, True]
    assert after.sums(CAUSES, after.number > 1) == {"decode": 0.5, "<read>": 0.25, "copy": 9.0}


def test_of_one_step_the_last_record_counts_but_all_corrupt_samples_do(make_run: MakeRun) -> None:
    events = [
        step(1, 1.0), CorruptEvent(1, "a", "bad"), CorruptEvent(1, "b", "bad"),
        evaluation(1, 10.0), step(1, 2.0), evaluation(1, 20.0),
    ]  # fmt: skip
    run = RunFiles.read(make_run(events))
    assert run.step_curve("loss").value.tolist() == [2.0]
    assert run.eval_curve("top1").value.tolist() == [20.0]
    assert [record["name"] for record in run.of_kind("corrupt")] == ["a", "b"]


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
    append_text(other, '{"event": "from the future"}\n')
    assert len(RunFiles.read(other).events) == 2


def test_values_that_are_no_numbers_are_left_out(make_run: MakeRun) -> None:
    folder = make_run([start(), step(1, 2.5)])
    values = ("null", '"3"', "true", "1e200", "-1e-200")
    for number, value in enumerate(values, start=2):
        append_text(
            folder, f'{{"event": "step", "step": {number}, "loss": {value}, "epoch": 0.5}}\n'
        )
    run = RunFiles.read(folder)
    curve = run.step_curve("loss")
    assert curve.value.tolist() == run.steps().known("loss").tolist() == [2.5, 0.0]
    assert (curve.step.tolist(), curve.epoch.tolist()) == ([1, 6], [0.01, 0.5])
    assert len(run.eval_curve("no such field")) == 0


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
    append_text(folder, line + "\n")
    assert re.search(r"metrics\.jsonl: .*line 2", fails(folder).cause)


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
