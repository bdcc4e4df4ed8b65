"""A comparison: names, baseline, differences, and notes that leave nothing unsaid."""

from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.report.compare_runs import read_runs
from paceline.report.comparison import Comparison
from report.made_up_ablations import write_ablation, write_run


def labels(comparison: Comparison) -> list[str]:
    return [row.label for row in comparison.rows]


def fails(comparison_of: Path, *names: str, baseline: str | None = None) -> str:
    with pytest.raises(ConfigError) as info:
        Comparison.of(read_runs([comparison_of]), names, baseline)
    return str(info.value)


@pytest.fixture
def ablation(tmp_path: Path) -> Comparison:
    return Comparison.of(read_runs(write_ablation(tmp_path)))


def test_rows_and_their_differences(ablation: Comparison) -> None:
    assert labels(ablation) == ["optim.name=sgd", "optim.name=lars", "optim.name=lars seed=3"]
    sgd, lars, half = ablation.rows
    assert ablation.baseline is sgd
    assert sgd.difference is None
    assert lars.difference is not None
    assert lars.difference.points == pytest.approx(93.1 - 94.2)
    # Sample variances 0.08 of two, 0.01 of three.
    assert lars.difference.standard_error == pytest.approx((0.08 / 2 + 0.01 / 3) ** 0.5)
    assert half.difference is None
    assert half.top1.mean == 60.0


def test_notes_tell_what_is_incomplete_and_what_else_differs(ablation: Comparison) -> None:
    assert ablation.notes == [
        "* not complete: the last evaluation so far, compared with nothing",
        "the rows differ in run.global_batch_size, optim.lr_base too",
    ]


def test_repeated_seeds_are_noted(tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / name, 90.0, run__seed=4)
    (note,) = Comparison.of(read_runs([tmp_path])).notes
    assert note == "cifar10: seed 4 in 2 runs, so the spread is not that of seeds alone"


def test_the_default_baseline_is_the_first_complete_row(tmp_path: Path) -> None:
    half = write_run(tmp_path / "half", 50.0, done=1)
    whole = [write_run(tmp_path / str(lr), 90.0, optim__lr_base=lr) for lr in (0.3, 0.4)]
    assert Comparison.of(read_runs([half, *whole])).baseline.label == "lr_base=0.3"


def test_a_baseline_by_row_by_path_and_by_folder_name(tmp_path: Path) -> None:
    runs = read_runs(write_ablation(tmp_path))
    for given in ("optim.name=lars", str(tmp_path / "lars-1"), "lars-1"):
        comparison = Comparison.of(runs, baseline=given)
        assert comparison.baseline.label == "optim.name=lars"
        difference = comparison.rows[0].difference
        assert difference is not None
        assert difference.points == pytest.approx(1.1)
    named = Comparison.of(runs, ["lars-1=LARS"], "LARS")
    assert named.baseline.label == "LARS"


def test_an_incomplete_baseline_compares_with_nothing_and_says_so(tmp_path: Path) -> None:
    comparison = Comparison.of(read_runs(write_ablation(tmp_path)), baseline="lars-3")
    assert [row.difference for row in comparison.rows] == [None] * 3
    assert "no differences: the baseline optim.name=lars seed=3 is not complete" in comparison.notes


def test_new_names(tmp_path: Path) -> None:
    runs = read_runs(write_ablation(tmp_path))
    given = ["sgd-1=plain SGD", "optim.name=lars=LARS", f"{tmp_path}/lars-3=half"]
    assert labels(Comparison.of(runs, given)) == ["plain SGD", "LARS", "half"]


def test_rows_of_seeds_alone_go_by_the_recipes_name(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / str(seed), 90.0 + seed, run__seed=seed)
    comparison = Comparison.of(read_runs([tmp_path]))
    assert labels(comparison) == ["cifar10"]
    assert comparison.notes == []


def test_incomplete_runs_of_one_seed_go_by_their_folder(tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / name, 50.0, done=1)
    write_run(tmp_path / "c", 90.0)
    comparison = Comparison.of(read_runs([tmp_path]))
    paths = [f"cifar10 run={tmp_path / name}" for name in "ab"]
    assert labels(comparison) == [*paths, "cifar10"]


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    write_ablation(tmp_path)
    assert "'larz-1': names no row and no run; did you mean 'lars-1'?" in fails(
        tmp_path, baseline="larz-1"
    )
    assert "'larz-1=x': names no row and no run; did you mean 'lars-1'?" in fails(
        tmp_path, "larz-1=x"
    )
    assert "is not of the form RUN=NAME" in fails(tmp_path, "LARS")
    assert "is not of the form RUN=NAME" in fails(tmp_path, "lars-0=")
    assert "is the name of another row" in fails(tmp_path, "lars-0=x", "sgd-0=x")


def test_a_folder_name_in_two_rows_is_refused(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(lr) / "run", 90.0, optim__lr_base=lr) for lr in (0.1, 0.2)]
    with pytest.raises(ConfigError, match="is a run of several rows; give the path"):
        Comparison.of(read_runs(runs), baseline="run")
    assert Comparison.of(read_runs(runs), baseline=str(runs[1])).baseline.label == "lr_base=0.2"
