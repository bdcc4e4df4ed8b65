"""Commands on named pipes, devices and links: they read regular files only, and never wait for one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cli_runs import Done, run, small_on
from data_sets import png, write_folders


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, and `odd`, a data set with a pipe and an endless file among its images."""
    folder = tmp_path_factory.mktemp("special")
    write_folders(folder / "data", train=16, val=8)
    done = run(small_on("data", "--output", "run", "--epochs", "1"), folder)
    assert done.code == 0, done.err
    write_folders(folder / "odd", train=16, val=8)
    for split in ("train", "val"):
        place = next((folder / "odd" / split).iterdir())
        os.mkfifo(place / "pipe.png")
        (place / "endless.png").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.png")
    (folder / "endless.png").symlink_to("/dev/zero")
    (folder / "photo.png").write_bytes(png(3))
    (folder / "linked.png").symlink_to("photo.png")
    os.mkfifo(folder / "pipe.pt")
    os.mkfifo(folder / "pipe.toml")
    return folder


def command(home: Path, *arguments: str) -> Done:
    """A hang ends at the limit of the wait; a file without end is stopped by the memory limit."""
    return run([*arguments], home, timeout_s=100)


def test_predict_reads_regular_files_and_links_to_them(home: Path) -> None:
    images = ("pipe.png", "endless.png", "photo.png", "linked.png")
    done = command(home, "predict", "run", *images, "--device", "cpu", "--json")
    found = [json.loads(line) for line in done.out.splitlines()]
    assert [bool(row.get("error")) for row in found] == [True, True, False, False]
    assert found[2]["labels"] == found[3]["labels"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("pack", "odd", "packed", "--workers", "1"),
        ("eval", "run", "--data-dir", "odd", "--device", "cpu"),
        tuple(small_on("odd", "--output", "odd-run", "--epochs", "1")),
    ],
    ids=lambda arguments: arguments[0],
)
def test_data_with_them_ends_as_with_corrupt_images(home: Path, arguments: tuple[str, ...]) -> None:
    """More of them than `data.max_corrupt_share` allows end the command with one line."""
    done = command(home, *arguments)
    assert done.code == 1
    line = done.error_line()
    assert "pipe.png" in line or "endless.png" in line or "corrupt" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "pipe.pt", "--device", "cpu"),
        ("predict", "pipe.pt", "photo.png"),
        ("train", "pipe.toml"),
        ("train", "--data-dir", "data", "--pretrained", "pipe.pt"),
        ("train", "--data-dir", "data", "--resume", "pipe.pt"),
    ],
    ids=" ".join,
)
def test_files_of_other_kinds_are_named_too(home: Path, arguments: tuple[str, ...]) -> None:
    done = command(home, *arguments)
    assert done.code not in (0, None)
    assert "pipe" in done.error_line()
