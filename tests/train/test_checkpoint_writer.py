"""Background checkpoints: what is copied, in which order things happen, and how errors arrive."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_runs import steps
from paceline.core.errors import CheckpointError
from paceline.core.events import CheckpointEvent, NoteEvent
from paceline.train import Checkpoint, run_training
from paceline.train.checkpoint import content_hash
from paceline.train.checkpoint_writer import CheckpointWriter, HostCopy
from paceline.train.run_state import RunState
from ranks import run_ranks
from small_runs import Silent, small_config
from train.runs import EVERY_STEP, AtStep, made_checkpoint, watched


def checkpoint(step: int = 3, **parts: Any) -> Checkpoint:
    weight = torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last)
    given = {
        "progress": {"step": step}, "model": {"weight": weight, "tied": weight},
        "callbacks": {"0:X": {"seen": [torch.ones(2), 1]}},
    }  # fmt: skip
    return made_checkpoint(**given | parts)


def test_the_copy_is_equal_and_independent_and_its_memory_is_kept() -> None:
    made, copies = checkpoint(), HostCopy()
    first = copies.take(made)
    assert first.to_bytes().tobytes() == made.to_bytes().tobytes()
    assert first.model["weight"].stride() == made.model["weight"].stride()
    assert first.model["tied"] is first.model["weight"]
    for part in (made.model["weight"], made.optimizer["state"][0]["momentum_buffer"]):
        part.add_(1)
    made.callbacks["0:X"]["seen"].append(2)
    assert float(first.model["weight"].sum()) == float(torch.arange(24.0).sum())
    assert first.callbacks["0:X"]["seen"][1:] == [1]
    memory = first.model["weight"].data_ptr()
    again = copies.take(made)
    assert again.model["weight"].data_ptr() == memory
    assert float(again.model["weight"].sum()) == float(torch.arange(24.0).sum()) + 24
    grown = copies.take(checkpoint(model={"weight": torch.zeros(7)}))
    assert grown.model["weight"].shape == (7,)


@pytest.mark.gpu
def test_tensors_of_a_gpu_are_copied_to_pinned_memory() -> None:
    weight = torch.randn(1000, 1000, device="cuda")
    expected = weight.cpu()
    copy = HostCopy().take(checkpoint(model={"weight": weight}))
    weight.zero_()
    assert copy.model["weight"].is_pinned()
    assert torch.equal(copy.model["weight"], expected)


@pytest.mark.gpu
def test_a_pinned_copy_is_complete_before_a_graph_changes_the_weights() -> None:
    """Replays before and after the copy, without a wait of the test's own between them."""
    weight, graph = torch.zeros(64, 1 << 20, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight.add_(1)
    copies, found = HostCopy(), []
    for number in range(1, 6):
        graph.replay()
        copy = copies.take(checkpoint(model={"weight": weight}))
        graph.replay()
        found.append((copy.model["weight"].unique().tolist(), [2.0 * number - 1]))
    assert all(have == want for have, want in found), found


def test_steps_go_on_while_a_checkpoint_is_written() -> None:
    writer, release = CheckpointWriter(background=True), threading.Event()

    def write(saved: Checkpoint) -> Path:
        release.wait(100)
        return Path(f"step-{saved.step}.pt")

    writer.save(checkpoint(), write, best=True, started=time.perf_counter())
    assert writer.take_written(wait=False) is None
    release.set()
    written = writer.take_written(wait=True)
    assert (written.step, written.best, written.path) == (3, True, Path("step-3.pt"))
    assert written.stall_s < written.save_s
    assert writer.take_written(wait=True) is None


@pytest.mark.parametrize("background", [True, False])
def test_any_error_of_the_writer_is_one_line(background: bool) -> None:
    writer = CheckpointWriter(background=background)

    def write(_: Checkpoint) -> Path:
        raise RuntimeError("unexpected\nfailure")

    writer.save(checkpoint(), write, best=False, started=time.perf_counter())
    written = writer.take_written(wait=True)
    assert isinstance(written.error, CheckpointError)
    assert "step 3" in str(written.error)
    assert "\n" not in str(written.error)


def files(folder: Path) -> dict[str, Checkpoint]:
    return {path.name: Checkpoint.read(path) for path in sorted((folder / "checkpoints").iterdir())}


def test_the_files_are_those_of_a_run_that_waits(tmp_path: Path) -> None:
    fast = watched(tmp_path / "fast", **EVERY_STEP, run__average_epochs=1.0)[1]
    slow = watched(
        tmp_path / "slow", **EVERY_STEP, run__average_epochs=1.0, checkpoint__background=False
    )[1]
    here, there = files(tmp_path / "fast"), files(tmp_path / "slow")
    assert here.keys() == there.keys()
    for name, saved in here.items():
        for part in ("model", "optimizer", "average", "precision", "sampler"):
            mine, other = (content_hash(getattr(c, part)) for c in (saved, there[name]))
            assert mine == other, (name, part)
    for events, waits in ((fast, False), (slow, True)):
        saves = [event for event in events if isinstance(event, CheckpointEvent)]
        assert [event.step for event in saves] == list(range(1, 8))
        assert all(event.stall_s is not None for event in saves)
        assert all((event.stall_s == event.save_s) == waits for event in saves)


@contextmanager
def write_fails(name: str, number: int) -> Iterator[threading.Event]:
    """The file with `name` in its own cannot be written, which shows once the event is set."""
    real, begun = os.fsync, threading.Event()

    def fsync(descriptor: int) -> None:
        if name in Path(f"/proc/self/fd/{descriptor}").readlink().name:
            begun.wait(100)
            raise OSError(number, os.strerror(number))
        real(descriptor)

    os.fsync = fsync
    try:
        yield begun
    finally:
        os.fsync = real


EVERY_OTHER_STEP: dict[str, Any] = {
    "checkpoint__interval_steps": 2, "checkpoint__interval_epochs": 0,
    "checkpoint__keep_best": False, "run__batch_size": 8,
}  # fmt: skip


def _full_disk(rank: int, folder: str) -> tuple[str, int]:
    """The second checkpoint finds no space, later than the step after it has begun."""

    with write_fails("step-00000004", errno.ENOSPC) as begun:
        display = AtStep(5, begun.set)
        try:
            run_training(small_config(folder, **EVERY_OTHER_STEP), lambda: display)
        except CheckpointError as error:
            return str(error), len(display.events)
    return "", len(display.events)


def test_an_error_of_the_writer_ends_all_ranks_with_its_line(tmp_path: Path) -> None:
    lines = [line for line, _ in run_ranks(2, _full_disk, str(tmp_path / "run"))]
    assert lines[0] == lines[1]
    assert "no space left" in lines[0]
    assert "step-00000002.pt, is untouched" in lines[0]
    names = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    assert "step-00000002.pt" in names
    assert not any(name.endswith(".tmp") for name in names)
    assert steps(tmp_path / "run")[-1] >= 5, (
        "training went on while the checkpoint was being written"
    )


def _fails_twice(rank: int, folder: str) -> list[str]:
    """The last save fails after Ctrl-C has ended the steps."""

    def interrupt() -> None:
        begun.set()
        raise KeyboardInterrupt

    display = AtStep(3, interrupt)
    with write_fails("step-00000002", errno.EIO) as begun:
        try:
            run_training(small_config(folder, **EVERY_OTHER_STEP), lambda: display)
        except KeyboardInterrupt:
            return [event.text for event in display.events if isinstance(event, NoteEvent)]
    return ["not interrupted"]


def test_a_save_that_fails_while_the_run_fails_anyway_is_a_note(tmp_path: Path) -> None:
    (notes,) = run_ranks(1, _fails_twice, str(tmp_path / "run"))
    assert any("step-00000002.pt" in note for note in notes), notes


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (torch.Tensor, "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        (OnGpu, "CUDA error: OS call failed\nmore advice"),
    ],
)
def test_without_memory_for_the_copy_the_steps_wait_for_the_file(
    monkeypatch: pytest.MonkeyPatch, kind: type[torch.Tensor], problem: str
) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError(problem)

    threads: list[str] = []

    def write(saved: Checkpoint) -> Path:
        threads.append(threading.current_thread().name)
        return Path(f"step-{saved.step}.pt")

    writer, notes = CheckpointWriter(background=True), []
    for step in (1, 2, 3):
        with monkeypatch.context() as patch:
            if step < 3:
                patch.setattr(torch, "empty_like", full)
                weight = torch.arange(6.0).as_subclass(kind)
                saved = checkpoint(step, model={"weight": weight})
            else:
                saved = checkpoint(step)
            writer.save(saved, write, best=False, started=time.perf_counter())
        written = writer.take_written(wait=True)
        assert written.path == Path(f"step-{step}.pt")
        assert (written.stall_s == written.save_s) == (step < 3)
        notes.append(written.note)
    assert threads == ["MainThread", "MainThread", "checkpoint writer"]
    assert "step 1" in notes[0]
    assert "\n" not in notes[0]
    assert notes[1:] == ["", ""], "once"


def test_another_error_of_the_copy_is_not_taken_for_a_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "empty_like", lost)
    with pytest.raises(RuntimeError, match="illegal"):
        HostCopy().take(checkpoint())


def _slow_disk(rank: int, folder: str) -> list[int]:
    """The first file is written once rank 1 has completed its part of the second save."""
    real, gathered = os.fsync, Path(folder).with_name("gathered")

    def fsync(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        until = time.monotonic() + 150
        while "step-00000001" in name and not gathered.exists():
            assert time.monotonic() < until, "rank 1 waits for the file of rank 0"
            time.sleep(0.01)
        real(descriptor)

    capture = RunState.capture

    def captured(self: RunState, progress: Any, **how: Any) -> Checkpoint | None:
        found = capture(self, progress, **how)
        if rank == 1 and progress.step == 2:
            gathered.touch()
        return found

    os.fsync, RunState.capture = fsync, captured  # type: ignore[method-assign]
    display = Silent()
    config = small_config(folder, checkpoint__interval_steps=1, run__batch_size=8)
    try:
        run_training(config, lambda: display)
    finally:
        os.fsync, RunState.capture = real, capture  # type: ignore[method-assign]
    return [event.step for event in display.events if isinstance(event, CheckpointEvent)]


def test_no_other_rank_waits_for_the_previous_file(tmp_path: Path) -> None:
    saved = run_ranks(2, _slow_disk, str(tmp_path / "run"))[0]
    assert saved == list(range(1, 8))
