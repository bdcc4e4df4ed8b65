"""Checkpoints that are broken, foreign or cannot be written: refused, and no good one is lost."""

from __future__ import annotations

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
from cli_runs import Call, events, run, run_two, small, small_on, summary
from data_sets import write_shards
from paceline.train.checkpoint import Checkpoint

KILL = partial(faults.signal_self, signal.SIGKILL)
SAVES = ("--set", "checkpoint.interval_steps=3")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has checkpoints of steps 3 and 6, and was killed in step 7."""
    folder = tmp_path_factory.mktemp("killed")
    fault = partial(faults.at_evaluation, 1, KILL)
    assert run(small("--output", "run", *SAVES), folder, fault).code == -signal.SIGKILL
    (folder / "run/run.lock").unlink()  # the lock of a dead process, which the next one removes
    return folder


@pytest.fixture
def unfinished(killed: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy to spoil. Whatever is refused must leave all other files of the run as they were."""
    shutil.copytree(killed / "run", tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    newest = tmp_path / "run/checkpoints/step-00000006.pt"
    yield newest
    for path, content in before.items():
        assert path == newest or path.read_bytes() == content, f"{path} was changed"
    after = {path for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert after == set(before)


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _cut_at_the_end(content: bytes) -> bytes:
    return content[:-100]


def _flipped(content: bytes) -> bytes:
    """A few bits, in the numbers of some tensors: torch itself does not notice. One alone might fall
    between two tensors, where the file is padded."""
    spoilt = bytearray(content)
    for place in (4, 5, 6):
        spoilt[len(content) * place // 10] ^= 1
    return bytes(spoilt)


def _overwritten(content: bytes) -> bytes:
    """A lost block of the disk at the front, where the tables are."""
    return content[:512] + bytes(512) + content[1024:]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_cut, "is damaged or not a checkpoint: it is truncated or damaged"),
        (_cut_at_the_end, "is damaged or not a checkpoint: it is truncated or damaged"),
        (lambda content: b"", "is damaged or not a checkpoint: it is empty"),
        (lambda content: b"hello", "is damaged or not a checkpoint: it is truncated or damaged"),
        (_flipped, "is damaged: its content does not match its SHA-256"),
        (_overwritten, "is damaged or not a checkpoint: it is truncated or damaged"),
    ],
)
def test_a_broken_checkpoint(
    call: Call, unfinished: Path, spoil: Callable[[bytes], bytes], words: str
) -> None:
    unfinished.write_bytes(spoil(unfinished.read_bytes()))
    done = call(*small("--output", "run", "--resume", f"run/checkpoints/{unfinished.name}", *SAVES))
    line = done.error_line()
    assert line.startswith(f"run/checkpoints/{unfinished.name} {words}")
    assert line.endswith("; resume from an older one with --resume FILE")
    assert done.code == 1


def test_the_remedy_for_a_broken_checkpoint_works(killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed / "run", tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step-00000006.pt"
    newest.write_bytes(_flipped(newest.read_bytes()))
    older = "run/checkpoints/step-00000003.pt"
    assert run(small("--resume", older, *SAVES), tmp_path).code == 0
    assert run(small("--output", "whole", *SAVES), tmp_path).code == 0
    ended, expected = summary(tmp_path / "run"), summary(tmp_path / "whole")
    assert ended["weights_sha256"] == expected["weights_sha256"]


def test_a_broken_checkpoint_fails_both_ranks(unfinished: Path, tmp_path: Path) -> None:
    unfinished.write_bytes(_flipped(unfinished.read_bytes()))
    for rank in run_two(small("--output", "run", "--resume", "run", *SAVES), tmp_path):
        assert "is damaged: its content does not match its SHA-256" in rank.error_line()
        assert rank.code == 1


@pytest.mark.parametrize("spoil", [_cut, _flipped, _overwritten, lambda content: b""])
def test_auto_goes_back_to_the_newest_sound_checkpoint_and_keeps_the_damaged_one(
    killed: Path, tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    shutil.copytree(killed / "run", tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step-00000006.pt"
    damaged = spoil(newest.read_bytes())
    newest.write_bytes(damaged)
    done = run(small("--output", "run", "--resume", "auto", *SAVES), tmp_path)
    assert done.code == 0, done.err
    assert "resumed from run/checkpoints/step-00000003.pt at step 3" in done.out
    told = "step-00000006.pt is damaged and renamed to *.damaged; resuming from step-00000003.pt"
    assert told in done.out
    assert told in events(tmp_path / "run", "start")[-1]["chosen"]["resume"]
    assert newest.with_name("step-00000006.pt.damaged").read_bytes() == damaged
    assert run(small("--output", "whole", *SAVES), tmp_path).code == 0
    ended, expected = summary(tmp_path / "run"), summary(tmp_path / "whole")
    assert ended["weights_sha256"] == expected["weights_sha256"]


def test_auto_goes_back_on_both_ranks(killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed / "run", tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step-00000006.pt"
    newest.write_bytes(_flipped(newest.read_bytes()))
    (tmp_path / "run/checkpoints/step-00000006.pt.damaged").write_text("an earlier one")
    done = run_two(small("--output", "run", "-b", "8", "--resume", "auto", *SAVES), tmp_path)
    assert [rank.code for rank in done] == [0, 0], done[0].err
    assert {events(tmp_path / "run", "start", rank)[-1]["step"] for rank in (0, 1)} == {3}
    names = {path.name for path in newest.parent.glob("*.damaged*")}
    assert names == {"step-00000006.pt.damaged", "step-00000006.pt.damaged-2"}


def test_auto_with_no_sound_checkpoint_names_them_and_changes_nothing(
    call: Call, unfinished: Path
) -> None:
    older = unfinished.with_name("step-00000003.pt")
    whole = older.read_bytes()
    for file in (unfinished, older):
        file.write_bytes(_flipped(file.read_bytes()))
    line = call(*small("--output", "run", "--resume", "auto", *SAVES)).error_line()
    assert "no intact checkpoint in run/checkpoints: step-00000006.pt, step-00000003.pt" in line
    older.write_bytes(whole)
    # A refusal for another reason keeps the damaged one where it is, too.
    unfinished.write_bytes(_flipped(whole))
    line = call(*small("--output", "run", "--resume", "auto", *SAVES, "--seed", "5")).error_line()
    assert "step-00000003.pt has run.seed = 0, this run 5" in line


class _Opaque:
    """What another program keeps in its checkpoints."""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"state_dict": {"fc.weight": torch.ones(2)}, "epoch": 3}, "is not a Paceline checkpoint;"),
        (torch.ones(3), "is not a Paceline checkpoint;"),
        ({"model": _Opaque()}, "is not a Paceline checkpoint: it contains objects of "),
    ],
)
def test_a_checkpoint_of_another_program(
    call: Call, tmp_path: Path, content: Any, words: str
) -> None:
    torch.save(content, tmp_path / "other.pt")
    for command in (small("--resume", "other.pt"), ["eval", "other.pt"]):
        line = call(*command).error_line()
        assert line.startswith(f"other.pt {words}")
        assert line.endswith("; load weights of other programs with --pretrained FILE")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--model resnet18", "has model.name = 'resnet_tiny', this run 'resnet18'"),
        ("--seed 5", "has run.seed = 0, this run 5"),
        ("--global-batch-size 32", "has run.global_batch_size = 16, this run 32"),
        ("--set data.synthetic_samples=108", "has number of training images = 100, this run 108"),
        ("--set data.synthetic_classes=5", "has classes = '4: 0, 1, 2 …"),
        ("--set data.image_size=32", "has data.image_size = 28, this run 32"),
    ],
)
def test_a_checkpoint_of_another_run(call: Call, unfinished: Path, more: str, words: str) -> None:
    line = call(*small("--output", "run", "--resume", "auto", *SAVES, *more.split())).error_line()
    assert line.startswith(f"run/checkpoints/{unfinished.name} {words}")
    assert line.endswith(
        "; resume with the checkpoint's settings, or start a new run with --pretrained"
    )


def test_a_checkpoint_of_other_labels_or_past_the_end(call: Call, tmp_path: Path) -> None:
    write_shards(tmp_path / "data")
    arguments = small_on("data", "--output", "run", "--resume", "auto")
    assert call(*arguments).code == 0
    line = call(*arguments, "--epochs", "1").error_line()
    assert "step-00000010.pt is at step 10, past the 5 of this run; raise --epochs" in line
    write_shards(tmp_path / "data", labels=lambda i: (i + 1) % 4)
    assert "step-00000010.pt has digest of the labels = " in call(*arguments).error_line()


def test_a_resume_into_the_folder_of_another_run(call: Call, unfinished: Path) -> None:
    run_folder = unfinished.parent.parent
    shutil.copytree(run_folder, "other")
    line = call(*small("--resume", "other", "--output", "run", *SAVES)).error_line()
    assert "run.output = 'run': already holds a run" in line


def test_a_full_disk_while_saving_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    arguments = small("--output", "run", "-b", "8", *SAVES)
    done = run_two(arguments, tmp_path, [partial(faults.full_disk, ".step-", 2), None])
    for rank in done:
        line = rank.error_line()
        assert line.startswith("rank 0: no space left to write run/checkpoints/step-00000006.pt (")
        assert "free space or choose another --output, then --resume auto; the last good" in line
        assert rank.code == 1
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000003.pt"]
    assert Checkpoint.read(tmp_path / "run/checkpoints/step-00000003.pt").step == 3
    assert [rank.code for rank in run_two([*arguments, "--resume", "auto"], tmp_path)] == [0, 0]


def test_a_disk_that_is_full_at_the_very_end(tmp_path: Path) -> None:
    arguments = small("--output", "run", "-b", "8")
    done = run_two(arguments, tmp_path, [partial(faults.full_disk, ".weights", 1), None])
    for rank in done:
        assert "rank 0: no space left to write run/weights.safetensors" in rank.error_line()
    assert not (tmp_path / "run/summary.json").exists()
    assert [rank.code for rank in run_two([*arguments, "--resume", "auto"], tmp_path)] == [0, 0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of a given size; again, it gets another size."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted: list[str] = []

    def mount(size: str) -> Path:
        options = f"remount,size={size}" if mounted else f"size={size}"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        if done.returncode:
            pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
        mounted.append(size)
        return place

    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    try:
        yield mount
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=True, timeout=10)


def test_a_disk_that_is_really_full(
    small_disk: Callable[[str], Path], tmp_path: Path, killed: Path
) -> None:
    size = (killed / "run/checkpoints/step-00000006.pt").stat().st_size
    disk = small_disk(f"{int(size * 1.6)}")
    arguments = small("--output", "disk/run", *SAVES)
    line = run(arguments, tmp_path).error_line()
    assert "no space left to write disk/run/checkpoints/step-00000006.pt" in line
    assert [path.name for path in (disk / "run/checkpoints").iterdir()] == ["step-00000003.pt"]
    small_disk("64m")
    assert run([*arguments, "--resume", "auto"], tmp_path).code == 0
    assert run(small("--output", "whole", *SAVES), tmp_path).code == 0
    ended, expected = summary(disk / "run"), summary(tmp_path / "whole")
    assert ended["weights_sha256"] == expected["weights_sha256"]
    assert ended["resumed_at_steps"] == [3]


def test_a_disk_too_full_for_the_records(small_disk: Callable[[str], Path], tmp_path: Path) -> None:
    disk = small_disk("1m")
    (disk / "run").mkdir()
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "filler").write_bytes(bytes(free - 5 * 4096))
    rarely = ("--set", "checkpoint.keep_best=false", "--set", "checkpoint.interval_epochs=0")
    line = run(small("--output", "disk/run", "--epochs", "30", *rarely), tmp_path).error_line()
    assert line.startswith("cannot write the run's records in disk/run: No space left on device;")
    assert len(events(disk / "run", "step")) > 3
    (disk / "filler").write_bytes(b"")
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "filler").write_bytes(bytes(free))
    line = run(small("--output", "disk/other"), tmp_path).error_line()
    assert "No space left on device" in line or "no space left to write disk/other" in line
