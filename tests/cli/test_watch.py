"""`paceline watch` and `paceline train --watch` as commands."""

from __future__ import annotations

import re
import signal
import socket
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path

import pytest

from cli_runs import run, small, started
from paceline.cli.report import find_runs
from paceline.core.errors import ConfigError, DataError

PAGE = re.compile(r"http://127\.0\.0\.1:\d+/")


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=100) as answer:
        text: str = answer.read().decode()
    return text


def test_a_training_serves_its_report_and_the_server_ends_with_it(tmp_path: Path) -> None:
    arguments = small("--output", "run", "--watch", "--epochs", "200")
    with started(arguments, tmp_path) as process:
        process.wait_until(lambda: PAGE.search(process.output()) is not None)
        found = PAGE.search(process.output())
        process.wait_until(lambda: "T = S · N · e" in page(found[0]))

        process.send(signal.SIGKILL)
        process.wait()
        # The server learns of it from its standard input.
        until = time.monotonic() + 100
        while _answers(found[0]):
            assert time.monotonic() < until
            time.sleep(0.05)


def _answers(url: str) -> bool:
    try:
        return bool(page(url))
    except (OSError, HTTPException):  # it may end within an answer
        return False


def test_a_training_whose_port_is_in_use_goes_on_without(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(small("--output", "run", "--set", f"run.report_port={port}"), tmp_path)
    assert done.code == 0
    lines = [line for line in done.out.splitlines() if "no live report" in line]
    assert len(lines) == 1
    assert str(port) in lines[0]


def test_watch_serves_runs_until_ctrl_c(tmp_path: Path) -> None:
    with started(["watch", "later", "--port", "0"], tmp_path) as process:
        process.wait_until(lambda: PAGE.search(process.output()) is not None)
        found = PAGE.search(process.output())
        assert "does not exist" in page(found[0])
        process.send(signal.SIGINT)
        assert process.wait().code == 0


def test_runs_in_a_folder(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "metrics.jsonl").write_text("")
    there = tmp_path / "runs/a"
    assert find_runs([tmp_path / "runs", there]) == [there, tmp_path / "runs/b"]
    assert find_runs([tmp_path / "later"]) == [tmp_path / "later"]
    with pytest.raises(DataError):
        find_runs([there / "metrics.jsonl"])
    for number in range(70):
        (tmp_path / f"many/{number}").mkdir(parents=True)
        (tmp_path / f"many/{number}/metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="RUN"):
        find_runs([tmp_path / "many"])
