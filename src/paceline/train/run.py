"""A whole training run on this rank: join, build, loop, conclude, leave.

In: a configuration, and observers for rank 0. Out: a `RunOutcome`; files in the run's folder. An error
on this rank is left for the others to find before it goes on its way.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.comm.agreement import PeerError
from paceline.comm.group import Group
from paceline.comm.watchdog import ShowError
from paceline.config import RunConfig
from paceline.core.errors import DeviceError, PacelineError
from paceline.core.events import JsonlWriter, NoteEvent, Observer
from paceline.core.signal_context import SignalWakeup
from paceline.core.topology import Topology
from paceline.data.sources.source_protocol import source_counters
from paceline.report.run_page import write_report
from paceline.train.checkpoint import Checkpoint, set_aside, write_atomically
from paceline.train.inputs import common_settings
from paceline.train.loop import RunResult, TrainingLoop
from paceline.train.machine import choose_device, hardware, versions
from paceline.train.run_lock import RunLock
from paceline.train.stop_signals import STOPS, StopSignals, user_signals
from paceline.train.tracing import TensorBoardWriter
from paceline.train.training import Training, build
from paceline.train.weights import applied, fingerprint, full_state, master_weights, write_weights

# What CUDA says when no further call into the context can succeed.
_LOST_CONTEXT = (
    "illegal memory access", "illegal address", "device-side assert", "launch failure", "misaligned",
    "illegal instruction", "invalid program counter", "hardware stack", "ECC", "launch timed out",
    "MPS",
)  # fmt: skip


@dataclass(frozen=True)
class RunOutcome:
    """`summary` is what `summary.json` holds; empty where a signal ended the run."""

    folder: Path
    rank: int
    result: RunResult
    summary: dict[str, Any]
    report: Path | None
    # The run had ended before: nothing was trained, and nothing written.
    already_finished: bool = False


def run_training(
    config: RunConfig, display: Callable[[], Observer], show_error: ShowError | None = None
) -> RunOutcome:
    """Trains on this rank; rank 0 also shows events on the observer that `display` makes. `tell` shows
    the error with which the watchdog ends this process, where nothing can be raised any more."""
    topology = Topology.from_env(os.environ)
    shared = {"program": "train", **common_settings(config)}
    device = choose_device(config, topology)
    with Group(topology, config.comm, device, show_error, shared) as group, _device_errors(group):
        return _train(config, group, display)


def _train(config: RunConfig, group: Group, display: Callable[[], Observer]) -> RunOutcome:
    training = build(config, group, StopSignals.of(config.checkpoint))
    try:
        with _device_errors(group):
            outcome = _finished_before(training) or _run_loop(training, display)
    except DeviceError:
        raise  # nothing can be closed on a lost context
    except BaseException as error:
        group.leaving(error)
        training.close()
        raise
    training.close()
    return outcome


def _run_loop(training: Training, display: Callable[[], Observer]) -> RunOutcome:
    _open_records(training, display)
    stops = [*STOPS, *user_signals(training.config.checkpoint, "stop")]
    # From here on signals are noted and agreed upon; before, they end the process at once.
    with training.stop, SignalWakeup(stops) as wakeup:
        training.group.watch_signals(wakeup.arrived)
        loop = TrainingLoop(training)
        try:
            result = loop.run()
        except PeerError as error:
            salvage(training, loop, error)
            raise
        return _conclude(training, result)


@contextmanager
def _device_errors(group: Group) -> Iterator[None]:
    """Within this context a CUDA error after which the context is lost is one line; others stay what
    they are."""
    try:
        yield
    except torch.AcceleratorError as failure:
        reason = str(failure).strip().splitlines()[0].removeprefix("CUDA error: ")
        if not any(sign in reason for sign in _LOST_CONTEXT):
            raise
        gone = group.lost_client()
        raise DeviceError(
            f"rank {group.rank}: {group.device} failed ({reason}){gone and ': '}{gone}",
            "look into the kernel log (dmesg) for Xid errors; find a faulty kernel with "
            "CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer; go on with --resume auto",
        ) from failure


def _finished_before(training: Training) -> RunOutcome | None:
    """The outcome of a run that was resumed though it had ended; its folder stays as it is."""
    group, folder, progress = training.group, training.folder, training.progress
    if folder.resume_from is None or not training.state.is_over(progress):
        return None
    summary: dict[str, Any] = {}
    if group.rank == 0 and folder.holds_its_checkpoint:
        summary = _read_summary(folder.path)
        # Killed before its summary was written, or resumed from an earlier checkpoint: not ended.
        if summary.get("steps") != progress.step:
            summary = {}
    # Only rank 0 may be able to read the folder.
    reason = group.broadcast_bytes(str(summary.get("stopped_by", "")).encode()).decode()
    if not reason:
        return None
    report = folder.path / "report.html"
    found = report if group.rank == 0 and report.exists() else None
    return RunOutcome(
        folder.path, group.rank, RunResult(reason, None), summary, found, already_finished=True
    )


def _read_summary(folder: Path) -> dict[str, Any]:
    """What `summary.json` holds; nothing where there is none that can be read."""
    try:
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _open_records(training: Training, display: Callable[[], Observer]) -> None:
    """The configuration and the observers. Not before the build: a resume that is refused must leave
    the run that it named as it was."""
    config, folder, error = training.config, training.folder, None
    try:
        if training.is_main and config.run.tensorboard:
            place = folder.path / "tensorboard"
            training.observers.append(TensorBoardWriter(place, training.progress.step))
        training.observers.append(JsonlWriter(folder.metrics(training.group.rank)))
        if training.is_main:
            training.observers.append(display())
            folder.sweep()
            for damaged in folder.damaged:
                set_aside(damaged, "damaged")
            if training.progress.step < training.plan.total_steps:
                # A finished run that goes on is not finished any more.
                (folder.path / "summary.json").unlink(missing_ok=True)
            folder.write_config(config.with_values(_resolved(training)))
            training.plan_file.write(folder.path / "plan.toml")
    except PacelineError as caught:
        error = caught
    except OSError as caught:
        error = PacelineError(
            f"cannot write the run's records in {folder.path}: {caught.strerror}",
            "free space or choose another --output",
        )
    training.group.agree("records", error)


def _resolved(training: Training) -> dict[str, Any]:
    """What the saved configuration says otherwise than the command: the global batch that came out,
    and neither where the run lies nor what it resumed, so that the file starts the run elsewhere."""
    batch = training.sizes.global_batch
    return {"run.output": "", "run.resume": "", "run.global_batch_size": batch}


def _conclude(training: Training, result: RunResult) -> RunOutcome:
    """Checks that all ranks hold the same weights; rank 0 writes weights, summary and report."""
    group, folder = training.group, training.folder.path
    average, optimizer = training.state.average, training.step.update.optimizer
    weights = fingerprint(master_weights(training.model, optimizer))
    facts = {"the final weights": weights}
    if average is not None:
        facts["their average"] = fingerprint(average.named())
    group.agree("weights", facts=facts, remedy="this is a defect: please report it")
    if result.stop_signal is not None:
        return RunOutcome(folder, group.rank, result, {}, None)
    summary = _summary(training, result, weights, _input_counters(training))
    if average is not None:
        summary["average_sha256"] = facts["their average"]
    report, error = None, None
    with applied(average), training.step.batch_norm.averaged(group):
        if group.rank == 0:
            try:
                training.check_folder()
                names = {"model": training.config.model.name, "step": str(training.progress.step)}
                if average is not None:
                    names["average_epochs"] = f"{training.config.run.average_epochs:g}"
                state = average.full_state() if average else full_state(training.model, optimizer)
                write_weights(state, folder / "weights.safetensors", names)
                text = json.dumps(summary, indent=2) + "\n"
                report = write_report(folder, summary=json.loads(text))
                # Last: with it the run counts as finished, and nothing that is missing is made again.
                write_atomically(folder / "summary.json", text.encode())
            except PacelineError as caught:
                error = caught
    group.agree("conclusion", error)
    return RunOutcome(folder, group.rank, result, summary, report)


def _input_counters(training: Training) -> dict[str, int]:
    """What both splits counted, summed over all ranks; on other ranks than 0 their own."""
    total: Counter[str] = Counter()
    for source in (training.source, training.validation):
        total.update(source_counters(source))
    told = training.group.gather_bytes(json.dumps(total).encode())
    for other in (told or [])[1:]:
        total.update(json.loads(other))
    return dict(total)


def _summary(
    training: Training, result: RunResult, weights: str, counters: dict[str, int]
) -> dict[str, Any]:
    progress, config = training.progress, training.config
    return {
        "recipe": config.run.name,
        "model": config.model.name,
        "top1": progress.top1,
        "top5": progress.top5,
        "val_loss": progress.val_loss,
        "best_top1": progress.best_top1,
        "best_step": progress.best_step,
        "images_per_s": progress.images_per_s,
        "epochs": training.plan.epoch_at(progress.step),
        "steps": progress.step,
        "images": progress.images,
        "world_size": training.group.world_size,
        "global_batch_size": training.sizes.global_batch,
        "batch_size": training.sizes.micro_batch,
        "accumulation": training.sizes.accumulation,
        "train_s": progress.train_s,
        "target_top1": config.run.target_top1,
        "time_to_target_s": progress.time_to_target_s,
        "stopped_by": result.stopped_by,
        "skipped_steps": progress.skipped_steps,
        "corrupt_samples": progress.corrupt_samples,
        "corrupt_val_samples": progress.corrupt_val_samples,
        "input_counters": counters,
        "resumed_at_steps": progress.resumes,
        "weights_sha256": weights,
        "seed": config.run.seed,
        "chosen": training.chosen,
        "versions": versions(),
        "hardware": hardware(training.group.device),
    }


# Saves what a surviving rank holds after another rank was lost.
#
# In: the training and its loop, right after a collective broke. Out: `step-N.salvaged.pt` in the
# run folder, or nothing. Weights, momenta and loss scale are equal on all ranks after every
# completed step, so one rank has them all. Batch-norm statistics differ between ranks, and those
# of the others are out of reach: the checkpoint holds this rank's alone and is marked as
# salvaged. Training itself never reads these statistics, so the weights of a resumed run stay
# exact; its evaluations differ until the statistics have renewed themselves.
#
# It never replaces a regular checkpoint, and the watchdog's deadline for leaving bounds its time.


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
