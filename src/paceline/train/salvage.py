"""Saves what a surviving rank holds after another rank was lost.

In: the training and its loop, right after a collective broke. Out: `step-N.salvaged.pt` in the run
folder, or nothing. Weights, momenta and loss scale are equal on all ranks after every completed step, so
one rank has them all. Batch-norm statistics differ between ranks, and those of the others are out of
reach: the checkpoint holds this rank's alone and is marked as salvaged. Training itself never reads these
statistics, so the weights of a resumed run stay exact; its evaluations differ until the statistics have
renewed themselves.

It never replaces a regular checkpoint, and the watchdog's deadline for leaving bounds its time.
"""

from __future__ import annotations

import contextlib
import time

import torch

from paceline.comm.agreement import PeerError
from paceline.core.events import NoteEvent
from paceline.train.checkpoint import Checkpoint
from paceline.train.loop import TrainingLoop
from paceline.train.run_lock import RunLock
from paceline.train.training import Training

# A device that does not finish what it has to do within this time is taken for hung.
_DEVICE_WAIT_S = 2.0
# The lowest rank that is left goes first: each waits a little longer than the one before it.
_RANK_WAIT_S, _MOST_WAIT_S = 0.25, 1.0


def salvage(training: Training, loop: TrainingLoop, error: PeerError) -> None:
    """Tries; whatever goes wrong here must not hide `error`, with which this rank is about to end."""
    if not training.config.checkpoint.salvage:
        return
    training.group.leaving(error)
    with contextlib.suppress(Exception):
        checkpoint = _last_completed_step(training, loop)
        if checkpoint is not None:
            _write(training, checkpoint)


def _last_completed_step(training: Training, loop: TrainingLoop) -> Checkpoint | None:
    """The state after the last step that this rank has completed; None where it cannot be trusted."""
    step, progress = training.step, training.progress
    if step.under_way and training.group.backend == "nccl":
        # The update is queued behind an exchange that NCCL gives up: its input is undefined.
        return None
    if not _device_answers(training.group.device):
        return None
    loop.account_for_launched_steps()
    step.roll_back()
    # Whether this very step is on disk is known once the lock is held: rank 0 may have died in the save.
    if progress.step == 0 or progress.skipped_in_a_row:
        return None
    checkpoint = training.state.capture_alone(progress)
    finite = all(bool(torch.isfinite(value).all()) for value in checkpoint.model.values())
    return checkpoint if finite else None


def _device_answers(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
    reached.record()
    deadline = time.monotonic() + _DEVICE_WAIT_S
    while not reached.query():  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _write(training: Training, checkpoint: Checkpoint) -> None:
    """Into the folder that rank 0 had locked: where it lives on, it still has the lock and writes itself;
    where it is gone, whoever takes the lock first."""
    shelf, rank = training.shelf, training.group.rank
    lock = None
    if training.is_main:
        training.check_folder()
    elif (training.folder.path / "config.toml").is_file():
        time.sleep(min(rank * _RANK_WAIT_S, _MOST_WAIT_S))
        lock = RunLock.acquire(training.folder.path, wait_s=0.0)
    else:
        return  # not on storage that this node shares with rank 0's
    try:
        saved = [*shelf.steps(), *shelf.salvaged_steps()]
        if max(saved, default=-1) >= checkpoint.step:
            return
        path = shelf.salvaged_path(checkpoint.step)
        checkpoint.write(path)
        training.emit(
            NoteEvent(
                f"salvaged step {checkpoint.step} after the loss of another rank: {path} "
                f"(batch-norm statistics of rank {rank} alone)"
            )
        )
    finally:
        if lock is not None:
            lock.release()
