from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from paceline.cli import app as cli
from paceline.version import __version__


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    return cli._run()


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"paceline {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "--epoch", "3"), "--epoch"),
        (("train", "--epochs", "many"), "run.epochs = 'many': is a str; give a whole number"),
        (("train", "--lr", "-.1"), "optim.lr = -0.1: must be above 0"),
        (("train", "-b", "1.5"), "run.batch_size = 1.5: is a float; give a whole number"),
        (("trian",), "trian"),
        (("train", "quikstart"), "did you mean 'quickstart'?"),
        (("train", "--model", "resnet51"), "did you mean 'resnet"),
        (("train", "--set", "optim.momentun=1"), "did you mean 'momentum'?"),
        (("train", "--set", "seed=1"), "did you mean 'run.seed'?"),
        (("train", "--nproc-per-node", "0"), "--nproc-per-node = 0: must be at least 1"),
        (("train", "--nproc-per-node", "3"), "cannot be divided among 3 ranks; use 126 or 129"),
        (("report", "nowhere"), "nowhere"),
        (("eval", "nowhere.pt"), "no checkpoint at nowhere.pt"),
        (("export", "nowhere.pt", "out.bin"), "end it in .safetensors"),
    ],
)
def test_a_mistake_is_one_line_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert call(monkeypatch, *arguments) in (1, 2)
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.startswith("paceline: error: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err


def test_a_bug_of_ours_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(standalone_mode: bool) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(cli, "app", broken)
    assert cli._run() == 1
    assert "Traceback" in capsys.readouterr().err


def test_help_and_report_start_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['paceline', 'train', '--help']\n"
        "from paceline.cli import app\n"
        "assert app._run() == 0\n"
        "import paceline.report.run_page, paceline.plan, paceline.config\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for flag in (
        "--data-dir", "--model", "-b", "--batch-size", "--global-batch-size", "--epochs", "--opt",
        "--lr", "--warmup-epochs", "--momentum", "--weight-decay", "--smoothing", "--seed",
        "--workers", "--output", "--resume", "--log-interval", "--nproc-per-node", "--set",
        "--target-top1", "--pretrained",
    ):  # fmt: skip
        assert flag in done.stdout


def test_ctrl_c_while_the_interpreter_ends_shows_no_traceback() -> None:
    program = (
        "import atexit, os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "from paceline.cli.app import main\n"
        "sys.argv = ['paceline', '--version']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
