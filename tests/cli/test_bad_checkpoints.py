"""Checkpoints that are damaged, foreign or cannot be written: refused, and no good one is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import faults
from chaos.disturbances import small_disk
from cli.conftest import Reference
from cli_runs import Call, events, run, run_two, small, small_on, summary
from data_sets import write_shards
from paceline.train.checkpoint import Checkpoint

KILL = partial(faults.signal_self, signal.SIGKILL)
# Not in the background, so that it is known which checkpoints a killed run has.
SAVES = ("--set", "checkpoint.interval_steps=3", "--set", "checkpoint.background=false")
NEWEST, OLDER = (f"run/checkpoints/step-0000000{step}.pt" for step in (6, 3))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has checkpoints of steps 3 and 6, and was killed in step 7."""
    folder = tmp_path_factory.mktemp("killed")
    fault = partial(faults.at_evaluation, 1, KILL)
    assert run(small("--output", "run", *SAVES), folder, fault).code == -signal.SIGKILL
    (folder / "run/run.lock").unlink()  # the lock of a dead process, which the next one removes
    return folder


@pytest.fixture
def copied(killed: Path, tmp_path: Path) -> Path:
    """The newest checkpoint of a copy of that run."""
    shutil.copytree(killed / "run", tmp_path / "run")
    return tmp_path / NEWEST


@pytest.fixture
def unchanged(copied: Path) -> Iterator[Path]:
    """The same; whatever is refused must leave all other files of the run as they were."""
    folder = copied.parent.parent
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    yield copied
    for path, content in before.items():
        assert path == copied or path.read_bytes() == content, f"{path} was changed"
    assert {path for path in folder.rglob("*") if path.is_file()} == set(before)


def _cut(content: bytes) -> bytes:
    return content[:-100]


def _empty(content: bytes) -> bytes:
    return b""


def _flipped(content: bytes) -> bytes:
    """A few bits, in the numbers of some tensors: torch itself does not notice. A single one might fall
    between two tensors, where the file is padded."""
    spoilt = bytearray(content)
    for tenth in (4, 5, 6):
        spoilt[len(content) * tenth // 10] ^= 1
    return bytes(spoilt)


def _overwritten(content: bytes) -> bytes:
    """A lost block of the disk at the front, where the tables are."""
    return content[:512] + bytes(512) + content[1024:]


@pytest.mark.parametrize("damage", [_cut, _empty, _flipped, _overwritten])
def test_a_damaged_checkpoint_is_refused(
    call: Call, unchanged: Path, damage: Callable[[bytes], bytes]
) -> None:
    unchanged.write_bytes(damage(unchanged.read_bytes()))
    done = call(*small("--output", "run", "--resume", NEWEST, *SAVES))
    assert done.error_line().startswith(NEWEST)
    assert "--resume FILE" in done.error_line()
    assert done.code == 1


@pytest.mark.parametrize("damage", [_flipped, _empty])
def test_auto_goes_back_to_the_newest_sound_checkpoint_and_keeps_the_damaged_one(
    copied: Path, tmp_path: Path, reference: Reference, damage: Callable[[bytes], bytes]
) -> None:
    damaged = damage(copied.read_bytes())
    copied.write_bytes(damaged)
    done = run(small("--output", "run", "--resume", "auto", *SAVES), tmp_path)
    assert done.code == 0, done.err
    start = events(tmp_path / "run", "start")[-1]
    assert (start["step"], start["resumed_from"]) == (3, OLDER)
    assert copied.name in start["chosen"]["resume"]
    assert copied.with_name(f"{copied.name}.damaged").read_bytes() == damaged
    ended = summary(tmp_path / "run")
    assert ended["weights_sha256"] == summary(reference())["weights_sha256"]


def test_auto_goes_back_on_both_ranks(copied: Path, tmp_path: Path) -> None:
    copied.write_bytes(_flipped(copied.read_bytes()))
    copied.with_name(f"{copied.name}.damaged").write_text("an earlier one")
    done = run_two(small("--output", "run", "-b", "8", "--resume", "auto", *SAVES), tmp_path)
    assert [rank.code for rank in done] == [0, 0], done[0].err
    assert {events(tmp_path / "run", "start", rank)[-1]["step"] for rank in (0, 1)} == {3}
    assert len(list(copied.parent.glob(f"{copied.name}.damaged*"))) == 2


def test_auto_without_a_sound_checkpoint_names_them_and_changes_nothing(
    call: Call, unchanged: Path
) -> None:
    older = unchanged.with_name(Path(OLDER).name)
    whole = older.read_bytes()
    for file in (unchanged, older):
        file.write_bytes(_flipped(file.read_bytes()))
    line = call(*small("--output", "run", "--resume", "auto", *SAVES)).error_line()
    assert f"{unchanged.name}, {older.name}" in line
    older.write_bytes(whole)
    # A refusal for another reason does not move the damaged one either.
    line = call(*small("--output", "run", "--resume", "auto", *SAVES, "--seed", "5")).error_line()
    assert "run.seed" in line


class _Opaque:
    """An object in the checkpoint of another program."""


@pytest.mark.parametrize(
    "content",
    [{"state_dict": {"fc.weight": torch.ones(2)}, "epoch": 3}, torch.ones(3), {"model": _Opaque()}],
)
def test_a_checkpoint_of_another_program(call: Call, tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "other.pt")
    for command in (small("--resume", "other.pt"), ["eval", "other.pt"]):
        line = call(*command).error_line()
        assert line.startswith("other.pt is not a Paceline checkpoint")
        assert "--pretrained" in line


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--model resnet18", "model.name = 'resnet_tiny'"),
        ("--seed 5", "run.seed = 0"),
        ("--set data.synthetic_samples=108", "number of training images = 100"),
    ],
)
def test_a_checkpoint_of_another_run(call: Call, unchanged: Path, more: str, words: str) -> None:
    line = call(*small("--output", "run", "--resume", "auto", *SAVES, *more.split())).error_line()
    assert line.startswith(f"{NEWEST} has {words}")


def test_a_checkpoint_of_other_labels_or_past_the_end(call: Call, tmp_path: Path) -> None:
    write_shards(tmp_path / "data")
    arguments = small_on("data", "--output", "run", "--resume", "auto")
    assert call(*arguments).code == 0
    line = call(*arguments, "--epochs", "1").error_line()
    assert "step-00000010.pt is at step 10" in line
    write_shards(tmp_path / "data", labels=lambda i: (i + 1) % 4)
    assert "step-00000010.pt has digest of the labels = " in call(*arguments).error_line()


@pytest.mark.parametrize(
    ("part", "nth", "file"),
    [(".step-", 2, "checkpoints/step-00000006.pt"), (".weights", 1, "weights.safetensors")],
)
def test_a_full_disk_while_saving_keeps_the_last_good_checkpoint(
    tmp_path: Path, part: str, nth: int, file: str
) -> None:
    arguments = small("--output", "run", "-b", "8", *SAVES)
    done = run_two(arguments, tmp_path, [partial(faults.full_disk, part, nth), None])
    lines = {rank.error_line() for rank in done}
    assert len(lines) == 1
    assert f"run/{file}" in lines.pop()
    assert not (tmp_path / "run/summary.json").exists()
    for path in (tmp_path / "run/checkpoints").iterdir():
        assert Checkpoint.read(path).step in (3, 9, 12, 13)
    assert [rank.code for rank in run_two([*arguments, "--resume", "auto"], tmp_path)] == [0, 0]


def fill(disk: Path, blocks_left: int) -> None:
    (disk / "filler").write_bytes(b"")
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "filler").write_bytes(bytes(free - blocks_left * 4096))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    (tmp_path / "disk").mkdir()
    with contextlib.ExitStack() as stack:
        try:
            mounted = stack.enter_context(small_disk(tmp_path / "disk", mib=1))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"cannot mount a small file system here: {error}")
        yield mounted


def test_a_disk_too_full_for_the_records(disk: Path, tmp_path: Path) -> None:
    (disk / "run").mkdir()
    fill(disk, blocks_left=5)
    rarely = ("--set", "checkpoint.keep_best=false", "--set", "checkpoint.interval_epochs=0")
    done = run(small("--output", "disk/run", "--epochs", "30", *rarely), tmp_path)
    assert "no space left to write disk/run/checkpoints" in done.error_line()
    assert done.out.count("metrics.jsonl cannot be written (No space left on device)") == 1
    assert len(events(disk / "run", "step")) > 3
    fill(disk, blocks_left=0)
    line = run(small("--output", "disk/other"), tmp_path).error_line()
    assert "no space left" in line.lower()
