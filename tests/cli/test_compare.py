"""`paceline compare` through the real command: tables, JSON, Markdown, the page, and mistakes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cli_runs import Call
from paceline.cli.report import print_comparison
from paceline.report.compare_runs import read_runs
from paceline.report.comparison import Comparison
from report.made_up_ablations import write_ablation, write_run
from report.made_up_runs import start


@pytest.fixture
def home(call: Call, tmp_path: Path) -> Path:
    """The place where `call` runs, with the runs in `runs`."""
    write_ablation(tmp_path / "runs")
    return tmp_path


def test_the_table_in_a_pipe_has_one_line_a_row(call: Call, home: Path) -> None:
    done = call("compare", "runs/sgd-0", "runs/sgd-1", "runs")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "all: model resnet18, 1 rank, no skipped steps"
    assert lines[1].split()[:3] == ["row", "n", "top-1"]
    assert lines[2].split("  ")[0] == "optim.name=sgd"
    assert "94.20 ± 0.28  94.00–94.40      baseline" in lines[2]
    assert "93.10 ± 0.10  93.00–93.20  -1.10 ± 0.21" in lines[3]
    assert lines[4].startswith("optim.name=lars seed=3 *")
    assert "2 of 4" in lines[4]
    assert lines[5].startswith("* not complete")
    assert "\x1b" not in done.out
    assert not list(home.glob("**/*.html"))


def on_terminal(home: Path, width: int) -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    print_comparison(console, Comparison.of(read_runs([home / "runs"])))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_terminal_of_80_columns_gets_higher_rows(home: Path) -> None:
    for seed in range(2):
        more = {"optim__name": "lars", "optim__decay_bias_norm": True, "run__seed": seed}
        write_run(home / f"runs/more-{seed}", 92.0, run__global_batch_size=2500, **more)
    lines = on_terminal(home, 80)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "93.10 ± 0.10" in text
    assert "optim.name=lars" in text
    assert "decay_bias_norm=true" in text
    # Nothing is lost on the way to fewer columns.
    for word in ("min–max", "93.00–93.20", "10 min 0 s", "2,000", "0.5000", "2 of 4", "± 0.21"):
        assert word in text, word


def test_a_wide_terminal_gets_all_columns(home: Path) -> None:
    lines = on_terminal(home, 160)
    assert any("93.10 ± 0.10  93.00–93.20" in line for line in lines)


def test_json_is_one_object(call: Call, home: Path) -> None:
    done = call("compare", "runs", "--json", "--baseline", "runs/sgd-1", "--label", "sgd-0=SGD")
    assert done.code == 0, done.err
    assert done.out.count("\n") == 1
    found = json.loads(done.out)
    assert found["baseline"] == "SGD"
    assert [row["label"] for row in found["rows"]] == [
        "optim.name=lars", "optim.name=lars seed=3", "SGD"
    ]  # fmt: skip
    assert found["rows"][0]["difference_points"] == pytest.approx(-1.1)
    assert [run["path"] for run in found["rows"][2]["runs"]] == ["runs/sgd-0", "runs/sgd-1"]


def test_markdown_and_the_page(call: Call, home: Path) -> None:
    done = call("compare", "runs", "--markdown", "--html", "out/page.html")
    assert done.code == 0
    assert "\n| optim.name=lars | 3 | 93.10 ± 0.10 |" in done.out
    assert done.err == "page: out/page.html\n"
    assert (home / "out/page.html").read_text("utf-8").count("<svg") == 2
    done = call("compare", "runs", "--html", ".")
    assert done.out.endswith("page: compare.html\n")
    assert (home / "compare.html").is_file()


def test_a_name_in_brackets_is_no_markup(call: Call, home: Path) -> None:
    done = call("compare", "runs", "--label", "sgd-0=[bold]SGD[/bold]")
    assert "[bold]SGD[/bold]" in done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nowhere runs", "run folder nowhere does not exist; give the folder"),
        ("runs file", "file is not a folder; give the folder"),
        ("runs empty", "empty is no run folder and holds none: no metrics.jsonl in it or"),
        ("runs damaged", "damaged/metrics.jsonl: line 2 is not an event record; restore"),
        ("runs early", "early has no evaluation yet; wait for its first one, or leave"),
        ("runs bare", "bare has no config.toml"),
        ("runs odd", "odd/config.toml is not TOML"),
        ("runs/sgd-0", "compare needs two runs or more, and runs/sgd-0 is one; add a run, or use"),
        ("runs/sgd-0 runs/sgd-0", "compare needs two runs or more"),
        ("", "Missing argument 'RUN'"),
        ("runs --baseline adam", "--baseline = 'adam': names no row and no run"),
        ("runs --label LARS", "--label = 'LARS': is not of the form RUN=NAME"),
        ("runs --json --markdown", "--markdown: cannot be given with --json"),
    ],
)
def test_mistakes_are_one_line(call: Call, home: Path, arguments: str, words: str) -> None:
    (home / "file").touch()
    (home / "empty").mkdir()
    for name in ("damaged", "bare", "odd"):
        write_run(home / name, 90.0)
    metrics = home / "damaged/metrics.jsonl"
    metrics.write_text(metrics.read_text("utf-8").replace("\n", "\n\x00\n", 1), "utf-8")
    (home / "bare/config.toml").unlink()
    (home / "odd/config.toml").write_text("[run", "utf-8")
    write_run(home / "early", 0.0, done=0, events=[start()])
    done = call("compare", *arguments.split())
    assert words in done.error_line()
    assert done.code == 2
    assert done.out == ""


def test_a_young_run_in_a_folder_of_runs_is_left_out_with_a_note(call: Call, home: Path) -> None:
    write_run(home / "runs/young", 0.0, done=0, events=[start()])
    (home / "runs/younger").mkdir()
    (home / "runs/younger/metrics.jsonl").touch()
    for more in ((), ("--markdown",)):
        done = call("compare", "runs", *more)
        assert (done.code, done.err) == (0, "")
        for name in ("young", "younger"):
            assert f"left out: runs/{name} has no evaluation yet" in done.out
    found = json.loads(call("compare", "runs", "--json").out)
    assert len([note for note in found["notes"] if note.startswith("left out: ")]) == 2
    assert "has no evaluation yet" in call("compare", "runs", "runs/young").error_line()


def test_one_run_and_a_young_one_are_no_comparison(call: Call, tmp_path: Path) -> None:
    write_run(tmp_path / "two/done", 90.0)
    write_run(tmp_path / "two/young", 0.0, done=0, events=[start()])
    line = call("compare", "two").error_line()
    assert "needs two runs or more, and two/done is one (left out: two/young has no" in line


def test_a_page_does_not_replace_the_files_of_a_run(call: Call, home: Path) -> None:
    before = (home / "runs/sgd-0/summary.json").read_bytes()
    for command in (
        ["report", "runs/sgd-0", "--out", "runs/sgd-0/summary.json"],
        ["compare", "runs", "--html", "runs/sgd-0/summary.json"],
    ):
        assert "summary.json is a file of the run" in call(*command).error_line()
    assert (home / "runs/sgd-0/summary.json").read_bytes() == before


def test_a_page_that_cannot_be_written(call: Call, home: Path) -> None:
    done = call("compare", "runs", "--html", "runs/sgd-0/config.toml/page.html")
    assert "page.html cannot be written" in done.error_line()


def test_it_starts_without_torch(home: Path) -> None:
    code = (
        "import sys; sys.argv = ['paceline', 'compare', 'runs', '--html', '.']\n"
        "from paceline.cli import app\n"
        "assert app._run() == 0\n"
        "assert {'torch', 'numpy'}.isdisjoint(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=home, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
