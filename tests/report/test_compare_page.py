"""The page of a comparison: whole, self-contained, harmless."""

from pathlib import Path

from paceline.report.compare_page import compare_page
from paceline.report.compare_runs import read_runs
from paceline.report.comparison import Comparison
from report.made_up_ablations import write_ablation, write_run
from report.test_html_page import checked


def test_table_charts_settings_and_runs(tmp_path: Path) -> None:
    page = checked(compare_page(Comparison.of(read_runs(write_ablation(tmp_path)))))
    assert page.tags.count("svg") == 2
    for word in (
        "Comparison of 6 runs in 3 rows",
        "all: model resnet18, 1 rank",
        "93.10 ± 0.10",
        "-1.10 ± 0.21",
        "2 of 4",
        "* not complete",
        "Validation top-1 (%)",
        "Training loss",
        "Settings that differ",
        "optim.lr_base",
        str(tmp_path / "lars-2"),
    ):
        assert word in page.text, word
    assert ("class", "c3") in page.attributes


def test_seeds_alone_have_no_settings_that_differ(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path / str(seed), 90.0, run__seed=seed)
    page = checked(compare_page(Comparison.of(read_runs([tmp_path]))))
    assert "Settings that differ" not in page.text


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>\"'&\x1b"
    for place, name in enumerate(("a", "<b>&")):
        write_run(tmp_path / name, 90.0, optim__name=f"{hostile}{place}", run__name=hostile)
    page = checked(compare_page(Comparison.of(read_runs([tmp_path]), ["a=<i>x</i>"])))
    assert {"b", "i"}.isdisjoint(page.tags)
    assert "<script>alert(1)</script>" in page.text
    assert "\x1b" not in page.text
