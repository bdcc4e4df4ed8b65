"""Runs are found, read once, and refused by name where they cannot be compared."""

from pathlib import Path

import pytest

from paceline.report.compare_runs import ComparedRun, CompareError, read_runs, repeated_seeds
from report.made_up_ablations import write_run
from report.made_up_runs import start, step


def names(*paths: Path) -> list[str]:
    return [run.path.name for run in read_runs(paths)]


def fails(*paths: Path) -> str:
    with pytest.raises(CompareError) as info:
        read_runs(paths)
    assert info.value.exit_code == 2
    assert len(str(info.value).splitlines()) == 1
    return str(info.value)


def test_runs_folders_of_runs_and_both(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "all" / name, 90.0) for name in ("b", "a")]
    (tmp_path / "all" / "notes").mkdir()
    (tmp_path / "all" / "README.md").touch()
    extra = write_run(tmp_path / "extra", 80.0)
    assert names(*runs) == ["b", "a"]
    assert names(tmp_path / "all") == ["a", "b"]
    assert names(extra, tmp_path / "all") == ["extra", "a", "b"]


def test_a_run_given_twice_counts_once(tmp_path: Path) -> None:
    a, b = (write_run(tmp_path / "all" / name, 90.0) for name in "ab")
    (tmp_path / "link").symlink_to(b)
    assert names(b, tmp_path / "all", tmp_path / "link", a / ".." / "a") == ["b", "a"]
    assert "compare needs two runs or more" in fails(a, a)


def test_the_figures_are_of_the_last_evaluation(tmp_path: Path) -> None:
    run = ComparedRun.read(write_run(tmp_path / "a", 90.0, val_loss=0.25, run__seed=7))
    assert run.outcome.best_top1 == 93.0
    assert (run.top1, run.val_loss, run.seed, run.epochs_planned) == (90.0, 0.25, 7, 4.0)
    assert run.complete
    assert run.settings["ranks"] == 1
    assert {"run.seed", "run.name", "run.output", "run.resume"}.isdisjoint(run.settings)


def test_a_last_loss_that_is_no_number_is_not_replaced_by_an_earlier_one(tmp_path: Path) -> None:
    run = ComparedRun.read(write_run(tmp_path / "a", 90.0, done=2, val_loss=float("nan")))
    assert run.val_loss is None


@pytest.mark.parametrize(
    ("done", "stopped_by", "complete"),
    [(4, None, True), (2, "target", True), (2, None, False), (2, "signal", False)],
)
def test_what_is_complete(
    tmp_path: Path, done: int, stopped_by: str | None, complete: bool
) -> None:
    run = ComparedRun.read(write_run(tmp_path / "a", 90.0, done=done, stopped_by=stopped_by))
    assert run.complete is complete


def test_epochs_planned_are_known_from_the_start_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", 90.0, done=2, without=["run.epochs"])
    assert ComparedRun.read(folder).epochs_planned == 4.0


def test_paths_that_are_no_runs(tmp_path: Path) -> None:
    good = write_run(tmp_path / "good", 90.0)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert "nowhere does not exist; give the folder" in fails(good, tmp_path / "nowhere")
    assert "file is not a folder" in fails(good, tmp_path / "file")
    assert "empty is no run folder and holds none: no metrics" in fails(good, tmp_path / "empty")
    assert "good is one; add a run, or use `paceline report" in fails(good)


def test_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    good = write_run(tmp_path / "good", 90.0)
    early = write_run(tmp_path / "early", 0.0, done=0, events=[start(), step(1)])
    assert "early has no evaluation yet; wait for its first one" in fails(good, early)
    bare = write_run(tmp_path / "bare", 90.0)
    (bare / "config.toml").unlink()
    assert "bare has no config.toml" in fails(good, bare)
    damaged = write_run(tmp_path / "damaged", 90.0)
    lines = (damaged / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
    (damaged / "metrics.jsonl").write_text("".join([lines[0], "{broken\n", *lines[1:]]), "utf-8")
    assert "damaged/metrics.jsonl: line 2 is not an event record" in fails(good, damaged)


def test_records_of_other_ranks_are_not_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", 90.0, ranks=2)
    (folder / "metrics.rank1.jsonl").write_text("broken\n", "utf-8")
    assert list(ComparedRun.read(folder).files.ranks) == [0]


def test_repeated_seeds_are_told(tmp_path: Path) -> None:
    runs = [
        ComparedRun.read(write_run(tmp_path / str(place), 90.0, run__seed=seed))
        for place, seed in enumerate((0, 1, 0))
    ]
    assert repeated_seeds(runs) == "seed 0 in 2 runs"
    assert repeated_seeds(runs[:2]) == ""
