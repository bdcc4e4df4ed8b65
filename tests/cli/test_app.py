"""Exit codes, one-line errors, imports, and output that nobody can write."""

from __future__ import annotations

import io
import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import faults
from cli_runs import Call, run, small, summary
from paceline.cli import app
from paceline.version import __version__
from programs import run_python
from report.made_up_runs import write_ablation, write_run


def test_the_version(call: Call) -> None:
    done = call("--version")
    assert (done.code, done.out) == (0, f"paceline {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("train --epoch 3", "see paceline train --help"),
        ("bench step --epoch 3", "see paceline bench step --help"),
        ("plan --nodes", "requires an argument; see paceline plan --help"),
        ("train --lr -.1", "optim.lr = -0.1"),
        ("trian", "; see paceline --help"),
        ("inspect a --data-dir b", "--data-dir = 'b'"),
        ("train --nproc-per-node 0", "--nproc-per-node = 0"),
        ("train -b 60 --global-batch-size 100", "use 60 or 120"),
        ("export nowhere.pt out.bin", "OUT = 'out.bin'"),
        ("compare", "RUN"),
    ],
)
def test_a_mistake_is_one_line(call: Call, arguments: str, words: str) -> None:
    done = call(*arguments.split())
    assert words in done.error_line()
    assert done.code in (1, 2)


def test_a_bug_keeps_its_traceback(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(standalone_mode: bool) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(app, "app", broken)
    done = call()
    assert done.code == 1
    assert "Traceback" in done.err


BLOCKED = """
import contextlib, importlib.abc, io, json, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "PIL", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
import paceline.report
assert {"rich", "typer"}.isdisjoint(sys.modules), "paceline.report needs nothing but numpy"
from paceline.cli.app import run_command
found = {}
for command in json.loads(sys.argv[1]):
    sys.argv = ["paceline", *command.split()]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        code = run_command()
    found[command.split()[0]] = code, out.getvalue()
print(json.dumps(found))
"""


def test_a_training_imports_neither_the_compiler_nor_triton(tmp_path: Path) -> None:
    """Importing torch.compile's engine takes as long as torch itself."""
    flags = small("--epochs", "1", "--output", "run")
    code = (
        f"import sys; sys.argv = ['paceline', *{flags!r}]\n"
        "from paceline.cli.app import run_command\n"
        "code = run_command()\n"
        "found = {'torch._dynamo', 'torch._inductor', 'sympy', 'triton'} & set(sys.modules)\n"
        "sys.exit(code or ', '.join(sorted(found)) or 0)"
    )
    done = run_python("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run/summary.json").is_file()


def test_without_torch_pillow_and_safetensors(tmp_path: Path) -> None:
    """`plan`, `report` and `compare` run, `doctor` reports them as missing, `--help` helps."""
    write_ablation(tmp_path / "runs")
    commands = [
        "plan --gpu H100 --nodes 4 --json --html plan.html", "report runs/sgd-0",
        "compare runs --html compare.html", "doctor", "train --help",
        "predict runs/sgd-0 a.jpg",
    ]  # fmt: skip
    done = run_python("-c", BLOCKED, json.dumps(commands), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str]] = json.loads(done.stdout)
    assert {name: code for name, (code, _) in found.items()} == {
        "plan": 0, "report": 0, "compare": 0, "doctor": 1, "train": 0, "predict": 2
    }  # fmt: skip
    for page in ("plan.html", "runs/sgd-0/report.html", "compare.html"):
        assert (tmp_path / page).is_file()
    rows = [line.split("│") for line in found["doctor"][1].splitlines() if "│" in line]
    state = {row[1].strip(): row[2].strip() for row in rows}
    assert {state[name] for name in ("torch", "pillow", "safetensors")} == {"missing"}
    assert "Traceback" not in found["doctor"][1]
    for flag in ("--data-dir", "--global-batch-size", "--resume", "--nproc-per-node", "--set"):
        assert flag in found["train"][1]


def test_ctrl_c_while_the_interpreter_ends_shows_no_traceback(tmp_path: Path) -> None:
    program = (
        "import atexit, os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "from paceline.cli.app import main\n"
        "sys.argv = ['paceline', '--version']\n"
        "main()\n"
    )
    done = run_python("-c", program, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    "fault",
    [
        *(
            pytest.param(partial(faults.unwritable_output, kind, 1, 2), id=kind)
            for kind in ("reader is gone", "terminal is gone", "disk is full")
        ),
        pytest.param(faults.closed_output, id="closed"),
    ],
)
def test_training_without_output_ends_as_usual(tmp_path: Path, fault: Any) -> None:
    done = run(small("--output", "run", "--log-interval", "1"), tmp_path, fault)
    assert (done.code, done.out, done.err) == (0, "", "")
    assert summary(tmp_path / "run")["steps"] == 13
    assert {"report.html", "weights.safetensors"} <= {p.name for p in (tmp_path / "run").iterdir()}


def test_an_interrupt_that_ends_the_reader_too_still_saves(tmp_path: Path) -> None:
    """Ctrl-C in `paceline train | tee log`."""
    fault = partial(
        faults.several,
        partial(faults.unwritable_output, "reader is gone"),
        partial(faults.at_micro_batch, 5, 0, partial(faults.signal_self, signal.SIGINT)),
    )
    done = run(small("--output", "run"), tmp_path, fault)
    assert (done.code, done.err) == (130, "")
    assert (tmp_path / "run/checkpoints/step-00000006.pt").is_file()


def test_lost_output_of_a_training_is_a_note_and_of_a_report_an_error(tmp_path: Path) -> None:
    fault = partial(faults.unwritable_output, "disk is full")
    done = run(small("--output", "run"), tmp_path, fault)
    assert done.code == 0
    assert done.err.startswith("paceline: note: ")
    assert done.err.count("\n") == 1
    done = run(["report", "run"], tmp_path, fault)
    assert "standard output" in done.error_line()
    assert done.code == 1


@pytest.mark.parametrize(
    ("arguments", "code"), [(["report", "run"], 0), (["--help"], 0), (["train", "no-recipe"], 2)]
)
def test_a_reader_that_has_left_changes_no_exit_code(
    tmp_path: Path, arguments: list[str], code: int
) -> None:
    write_run(tmp_path / "run", 90.0)
    fault = partial(faults.unwritable_output, "reader is gone", 1, 2)
    done = run(arguments, tmp_path, fault)
    assert (done.code, done.err) == (code, "")


def test_a_non_blocking_pipe_is_written_until_its_reader_is_gone() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    raw = app.LossyOutput(write)
    stream = io.BufferedWriter(raw)
    stream.write(b"x" * 10)
    stream.flush()
    assert (os.read(read, 100), raw.problem) == (b"x" * 10, None)
    os.close(read)
    stream.write(b"y")
    stream.flush()
    assert isinstance(raw.problem, BrokenPipeError)
    os.close(write)
