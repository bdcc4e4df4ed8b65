"""`paceline pack` and `paceline inspect`, as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli_runs import Call
from data_sets import write_folders, write_shards
from paceline.core.host import SignalContext
from paceline.data.sources.tar_index import scan_shard


def test_from_folders_to_shards_and_back(call: Call, tmp_path: Path) -> None:
    write_folders(tmp_path / "in")
    done = call(
        "pack", "in", "out", "--short-side", "16", "--shard-samples", "20", "--workers", "2"
    )
    assert done.code == 0, done
    assert "images in" in done.out
    assert (tmp_path / "out" / "train-00000.tar").is_file()
    found = call("inspect", "out", "--all", "--json")
    assert found.code == 0
    report = json.loads(found.out)
    assert report["problems"] == []
    assert set(report["splits"]) == {"train", "val"}
    again = call("pack", "in", "out", "--short-side", "16", "--shard-samples", "20")
    assert again.code == 0
    other = call("pack", "in", "out", "--short-side", "8", "--shard-samples", "20")
    assert "short_side" in other.error_line()
    assert other.code == 1


def test_inspect_finds_what_is_wrong(call: Call, tmp_path: Path) -> None:
    write_shards(tmp_path / "set")
    assert call("inspect", "--data-dir", "set").code == 0
    shard = next((tmp_path / "set").glob("train-*.tar"))
    os.truncate(shard, 3000)
    done = call("inspect", "set")
    assert done.code == 1
    assert f"problem: set/{shard.name}" in done.out


def test_names_in_the_data_cannot_control_the_terminal(call: Call, tmp_path: Path) -> None:
    """File names may hold escape sequences and bytes that are no text."""
    write_folders(tmp_path / "in")
    folder = next(path for path in (tmp_path / "in" / "train").iterdir() if path.is_dir())
    evil = os.fsencode(folder) + b"/a\x1b[2J\x1b]0;owned\x07\xff.png"
    Path(os.fsdecode(evil)).write_bytes(b"no image")
    for command in (
        ["inspect", "in", "--all"],
        ["pack", "in", "out", "--max-corrupt-share", "0.5"],
    ):
        done = call(*command)
        assert "owned" in done.out, done
        assert all(line.isprintable() for line in (done.out + done.err).split("\n"))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["in"], "SRC DST = 'in'"),
        (["in", "out", "--source", "embedded"], "--source embedded"),
        (["in", "in"], "DST = 'in'"),
        (["absent", "out"], "absent"),
        (["in", "out", "--quality", "200"], "--quality = 200"),
        (["in", "out", "--split", "test"], "--split = 'test'"),
        (["in", "out", "--source", "tars"], "data.source = 'tars'"),
    ],
)
def test_mistakes_are_one_line(call: Call, tmp_path: Path, arguments: list[str], line: str) -> None:
    write_folders(tmp_path / "in")
    assert line in call("pack", *arguments).error_line()
    assert not (tmp_path / "out").exists()


def test_control_c(tmp_path: Path) -> None:
    """A real signal to a real process: one line, nothing half-written under a final name."""
    # 7,000 shards take minutes: the pack does not end before the signal comes.
    command = [sys.executable, "-m", "paceline", "pack", "--source", "embedded", "out",
               "--shard-samples", "2", "--workers", "1"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"}
    # Whoever started the tests may ignore SIGINT, as a shell's background does; so would the child.
    with SignalContext([signal.SIGINT], signal.default_int_handler):
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
    try:
        while process.poll() is None and not (tmp_path / "out" / "train-00002.tar").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, f"{out}\n{err}"
    assert err.startswith("interrupted: ")
    assert err.count("\n") == 1
    assert not list((tmp_path / "out").glob(".*.tmp"))
    shards = sorted((tmp_path / "out").glob("*.tar"))
    manifest = json.loads((tmp_path / "out" / "pack.json").read_text())
    kept = [shard["name"] for shard in manifest["splits"]["train"]["shards"]]
    # The signal may come between a shard's last byte and the manifest; such a shard is packed again.
    assert [path.name for path in shards][: len(kept)] == kept
    assert len(shards) - len(kept) <= 1
    for path in shards:
        with path.open("rb") as content:
            assert len(scan_shard(path, content)) == 2
