"""`paceline compare` and `paceline report` as commands: terminal tables, options, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_runs import Call
from report.made_up_runs import write_ablation


@pytest.fixture
def home(call: Call, tmp_path: Path) -> Path:
    """The folder in which `call` runs, with runs in `runs`."""
    write_ablation(tmp_path / "runs")
    return tmp_path


def test_in_a_pipe_each_row_is_one_line(call: Call, home: Path) -> None:
    done = call("compare", "runs/sgd-0", "runs/sgd-1", "runs", "--label", "sgd-0=[bold]SGD[/bold]")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[1].split()[:3] == ["row", "n", "top-1"]
    assert lines[2].startswith("[bold]SGD[/bold]"), "labels are not markup"
    assert "93.10 ± 0.10  93.00–93.20  -1.10 ± 0.21" in lines[3]
    assert lines[4].startswith("opt=lars batch=2500 lr_base=3 run=runs/lars-3 *")
    assert "\x1b" not in done.out
    assert not list(home.glob("**/*.html"))


def test_json_markdown_and_the_page(call: Call, home: Path) -> None:
    done = call("compare", "runs", "--json", "--baseline", "runs/sgd-1", "--label", "sgd-0=SGD")
    assert (done.code, done.out.count("\n")) == (0, 1)
    found = json.loads(done.out)
    assert found["baseline"] == "SGD"
    assert [run["path"] for run in found["rows"][2]["runs"]] == ["runs/sgd-0", "runs/sgd-1"]
    done = call("compare", "runs", "--markdown", "--html", "out/page.html")
    assert "\n| opt=lars batch=2500 lr_base=3 | 3 | 93.10 ± 0.10 |" in done.out
    assert done.err == "page: out/page.html\n"
    assert (home / "out/page.html").is_file()
    assert call("compare", "runs", "--html", ".").out.endswith("page: compare.html\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nowhere runs", "nowhere"),
        ("runs/sgd-0", "runs/sgd-0"),
        ("runs --baseline adam", "--baseline = 'adam'"),
        ("runs --label LARS", "--label = 'LARS'"),
        ("runs --json --markdown", "--markdown"),
        ("runs --html runs/sgd-0/summary.json", "summary.json"),
        ("runs --html runs/sgd-0/config.toml/page.html", "page.html"),
    ],
)
def test_mistakes_are_one_line(call: Call, home: Path, arguments: str, words: str) -> None:
    before = (home / "runs/sgd-0/summary.json").read_bytes()
    done = call("compare", *arguments.split())
    assert words in done.error_line()
    assert done.out == ""
    assert (home / "runs/sgd-0/summary.json").read_bytes() == before


def test_the_report_of_a_run(call: Call, home: Path) -> None:
    done = call("report", "runs/lars-3", "--out", "page.html")
    assert done.code == 0, done.err
    assert "unfinished, at step 10 of 20" in done.out
    assert done.out.endswith("report: page.html\n")
    assert (home / "page.html").is_file()
    assert not (home / "runs/lars-3/report.html").exists()
    assert "did you mean " in call("report", "runs").error_line()
