"""Runs a whole training run on this rank: join the group, build, train, write results, leave.

If an error occurs, this rank first reports the error to all other ranks and then raises it.
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
from torch import nn

from paceline.comm.group import Group
from paceline.comm.peer_errors import LostMemberError, PeerError, ShowError
from paceline.config import RunConfig
from paceline.core.errors import ConfigError, DataError, DeviceError, PacelineError
from paceline.core.events import JsonlWriter, NoteEvent, Observer, StopEvent
from paceline.core.extensions import load_extension
from paceline.core.files import read_regular
from paceline.core.host import SignalWakeup, StartUp
from paceline.core.topology import Topology
from paceline.core.untrusted import parse_table
from paceline.plan.noise import NoiseScale
from paceline.train.build import build
from paceline.train.checkpoint import Checkpoint, set_aside, write_atomically
from paceline.train.components import Components
from paceline.train.inputs import common_settings, load_trackers, shared_versions, tracker_names
from paceline.train.loop import RunResult, TrainingLoop
from paceline.train.machine import choose_device, hardware, versions
from paceline.train.observers import watch_run
from paceline.train.recovery import recover
from paceline.train.run_folder import RunLock
from paceline.train.step_records import RARE_EVENTS, each_rank_writes
from paceline.train.stop_signals import STOPS, StopSignals, user_signals
from paceline.train.training import Training
from paceline.train.weights import (
    applied,
    as_metadata,
    fingerprint,
    finish_module,
    full_state,
    master_weights,
    preprocessing,
    write_weights,
)

# Texts in CUDA's error messages which mean that the CUDA context is lost.
_LOST_CONTEXT = (
    "illegal memory access", "illegal address", "device-side assert", "launch failure", "misaligned",
    "illegal instruction", "invalid program counter", "hardware stack", "ECC", "launch timed out",
    "MPS",
)  # fmt: skip
# Salvage: a device that does not finish its work within this time is assumed to hang.
_DEVICE_WAIT_S = 2.0
# Salvage: rank r waits r times the first value, at most the second value, before it takes the lock.
_RANK_WAIT_S, _MOST_WAIT_S = 0.25, 1.0
# Salvage: time to wait while a different surviving rank holds the lock and writes.
_LOCK_WAIT_S = 1.0


@dataclass(frozen=True)
class RunOutcome:
    """The result of `run_training` on this rank.

    Attributes:
        folder: The run folder.
        rank: Number of this rank.
        result: The reason why training stopped.
        summary: Content of `summary.json` on rank 0. Empty if a signal ended the run, and on all other
            ranks.
        report: Path of the HTML report, if it was written.
        already_finished: True if the resumed run was already complete, so that nothing was trained
            or written.
    """

    folder: Path
    rank: int
    result: RunResult
    summary: dict[str, Any]
    report: Path | None
    already_finished: bool = False


def run_training(
    config: RunConfig,
    display: Callable[[], Observer],
    show_error: ShowError | None = None,
    components: Components | None = None,
    startup: StartUp | None = None,
) -> RunOutcome:
    """Trains on this rank.

    Args:
        config: The settings of the run.
        display: Creates the observer that displays the events of rank 0.
        show_error: Displays the error with which the watchdog ends the process. At that time, no
            exception can be raised any more.
        components: Python objects that replace objects that the settings name.
        startup: Times that the parts of the start-up have taken until this call.

    Returns:
        The result on this rank.

    Raises:
        PacelineError: If the run fails on any rank.
    """
    startup = startup or StartUp()
    topology = Topology.from_env(os.environ)
    shared = {"program": "train", **common_settings(config)}
    device = choose_device(config, topology)
    with (
        Group(
            topology, config.comm, device, show_error, shared, shared_versions(), elastic=True
        ) as group,
        _device_errors(group),
    ):
        startup.end("device and ranks")
        return _train(config, group, display, components or Components(), startup)


def _train(
    config: RunConfig, group: Group, display: Callable[[], Observer], components: Components,
    startup: StartUp,
) -> RunOutcome:  # fmt: skip
    training = build(config, group, StopSignals.of(config.checkpoint), components, startup)
    try:
        with _device_errors(group):
            outcome = _finished_before(training) or _run_loop(training, display)
    except DeviceError:
        # Nothing can be closed in a lost context. Only a checkpoint in host memory can still be written.
        training.finish_save(run_fails=True)
        raise
    except BaseException as error:
        group.leaving(error)
        training.finish_save(run_fails=True)
        training.close()
        _finish_given_module(training, components)
        raise
    training.close()
    _finish_given_module(training, components)
    return outcome


def _finish_given_module(training: Training, components: Components) -> None:
    if isinstance(components.model, nn.Module):
        last = full_state(training.model, training.step.optimizer)
        finish_module(training.model, training.final_state or last)


def _run_loop(training: Training, display: Callable[[], Observer]) -> RunOutcome:
    _open_records(training, display)
    stops = [*STOPS, *user_signals(training.config.checkpoint, "stop")]
    # From here on, all ranks stop together after a signal. Before, a signal ends the process immediately.
    with training.stop, SignalWakeup(stops) as wakeup:
        training.group.watch_signals(wakeup.arrived)
        loop = TrainingLoop(training)
        try:
            return _run_generations(training, loop)
        except PeerError as error:
            salvage(training, loop, error)
            raise


def _run_generations(training: Training, loop: TrainingLoop) -> RunOutcome:
    """Runs the training loop to its end. With `comm.min_ranks`, continues after ranks were lost."""
    started, lost = False, False
    while True:
        try:
            if lost:
                recover(training, loop)
            if not started:
                loop.start()
            started, lost = True, False
            outcome = _conclude(training, loop.run())
            if training.is_main:
                training.group.finish()
            return outcome
        except LostMemberError:
            if training.step.faulted:
                raise  # the ranks end with an error on which they have agreed
            lost = True  # the error refers to frames with old buffers, so it is not kept


@contextmanager
def _device_errors(group: Group) -> Iterator[None]:
    """Replaces CUDA errors that destroy the CUDA context by a DeviceError of one line."""
    try:
        yield
    except torch.AcceleratorError as failure:
        reason = str(failure).strip().splitlines()[0].removeprefix("CUDA error: ")
        if not any(sign in reason for sign in _LOST_CONTEXT):
            raise
        gone = group.lost_client()
        raise DeviceError(
            f"rank {group.rank}: {group.device} failed ({reason}){gone and ': '}{gone}",
            "check the kernel log (dmesg) for Xid errors; find a faulty kernel with "
            "CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer; continue with --resume auto",
        ) from failure


def _finished_before(training: Training) -> RunOutcome | None:
    """Returns the result of a resumed run that had already finished; None if steps are left.

    The folder of a finished run stays unchanged.
    """
    group, folder, progress = training.group, training.folder, training.progress
    if folder.resume_from is None or not training.state.is_over(progress):
        return None
    summary: dict[str, Any] = {}
    if group.rank == 0 and folder.holds_its_checkpoint:
        summary = _read_summary(folder.path)
        # The run has not finished if it was killed before the summary, or resumes an earlier checkpoint.
        if summary.get("steps") != progress.step:
            summary = {}
    # The other ranks may not be able to read the folder.
    reason = group.broadcast_bytes(str(summary.get("stopped_by", "")).encode()).decode()
    if not reason:
        return None
    report = folder.path / "report.html"
    return RunOutcome(
        folder.path, group.rank, RunResult(reason, None), summary,
        report if group.rank == 0 and report.exists() else None, already_finished=True,
    )  # fmt: skip


def _read_summary(folder: Path) -> dict[str, Any]:
    """Reads `summary.json`; returns {} if that fails."""
    try:
        return parse_table(read_regular(folder / "summary.json"))
    except (OSError, ValueError):
        return {}


def _open_records(training: Training, display: Callable[[], Observer]) -> None:
    """Writes the configuration and opens the observers.

    Runs after `build`, because a resume that `build` refuses must leave the run folder unchanged.
    """
    config, folder, error = training.config, training.folder, None
    try:
        if training.is_main:
            folder.sweep()
            # Trackers come first, so that their last notes still reach the later observers at the end.
            if names := tracker_names(config):
                training.observers += load_trackers(names).open_trackers(
                    names, folder.path, training.progress.step, config.flat(),
                    lambda text: training.emit(NoteEvent(text)),
                )  # fmt: skip
        path, rank = folder.metrics(training.group.rank), training.group.rank
        writes_all = rank == 0 or each_rank_writes(config.run, training.group.world_size)
        training.observers.append(
            JsonlWriter(path) if writes_all else JsonlWriter(path, RARE_EVENTS)
        )
        if training.is_main:
            training.observers.append(display())
            for damaged in folder.damaged:
                set_aside(damaged, "damaged")
            if training.progress.step < training.plan.total_steps:
                # A finished run that is continued is no longer finished.
                (folder.path / "summary.json").unlink(missing_ok=True)
            folder.write_config(training.written)
            # Not `PlanFile.write`, whose error would name a setting of the user.
            (folder.path / "plan.toml").write_text(training.plan_file.to_text(), encoding="utf-8")
            if config.run.report_port is not None:
                watching = watch_run(folder.path, config.run.report_port, training.emit)
                training.observers += watching
        if training.callbacks is not None:
            training.observers.append(training.callbacks)
    except PacelineError as caught:
        error = caught
    except OSError as caught:
        error = PacelineError(
            f"cannot write the run's records in {folder.path}: {caught.strerror}",
            "free space or choose another --output",
        )
    training.group.agree("records", error)


def _conclude(training: Training, result: RunResult) -> RunOutcome:
    """Checks that all ranks have the same weights; rank 0 writes weights, summary and report."""
    group, folder = training.group, training.folder.path
    average, optimizer = training.state.average, training.step.optimizer
    training.step.strategy.conclude()
    weights = fingerprint(master_weights(training.model, optimizer))
    facts = {"the final weights": weights}
    if average is not None:
        named = master_weights(training.model, optimizer, average.weights)
        facts["their average"] = fingerprint(named)
    # An error of a callback is reported here, after the save, so that no step is lost.
    failed = training.step.fault or (training.callbacks and training.callbacks.error)
    group.agree("weights", failed or None, facts, "this is a defect: please report it")
    training.emit(StopEvent(step=training.progress.step, reason=result.stopped_by))
    if result.stop_signal is not None:
        return RunOutcome(folder, group.rank, result, {}, None)
    summary = _summary(training, result, weights, _input_counters(training))
    if average is not None:
        summary["average_sha256"] = facts["their average"]
    report, error = None, None
    with applied(average), training.step.batch_norm.averaged(group):
        state = average.full_state() if average else full_state(training.model, optimizer)
        if training.keeps_final_state:
            training.final_state = {name: value.clone() for name, value in state.items()}
        if group.rank == 0:
            try:
                training.check_folder()
                about = preprocessing(
                    training.config, training.source.classes, training.progress.step
                )
                write_weights(state, folder / "weights.safetensors", as_metadata(about))
                text = json.dumps(summary, indent=2) + "\n"
                report = _write_report(training, json.loads(text))
                # The summary is last, because a run with a summary is treated as finished.
                write_atomically(folder / "summary.json", text.encode())
            except PacelineError as caught:
                error = caught
    # This agreement is last, so that a late error of a callback does not prevent the results.
    late = training.callbacks.error if training.callbacks else None
    group.agree("conclusion", error or late)
    return RunOutcome(folder, group.rank, result, summary, report)


def _write_report(training: Training, summary: dict[str, Any]) -> Path | None:
    """Writes the HTML report; emits a note if records cannot be read or `report` is not installed."""
    try:
        report = load_extension("report", "report", "report.html")
        page: Path = report.write_report(training.folder.path, summary=summary)
        return page
    except (ConfigError, DataError) as error:
        training.emit(NoteEvent(f"no report: {error}"))
        return None


def _input_counters(training: Training) -> dict[str, int]:
    """Returns the counters of training and validation data, on rank 0 summed over all ranks."""
    total: Counter[str] = Counter()
    for source in (training.source, training.validation):
        total.update(source.counters())
    gathered = training.group.gather_bytes(json.dumps(total).encode())
    for other in (gathered or [])[1:]:
        total.update(json.loads(other))
    return dict(total)


# Fields of `Progress` in the summary.
_PROGRESS = (
    "top1", "top5", "val_loss", "best_top1", "best_step", "images_per_s", "images", "train_s",
    "time_to_target_s", "skipped_steps", "corrupt_samples", "corrupt_val_samples",
)  # fmt: skip


def _summary(
    training: Training, result: RunResult, weights: str, counters: dict[str, int]
) -> dict[str, Any]:
    progress, config = training.progress, training.config
    optimizer_state, exchange_state = training.step.state_bytes_per_parameter()
    return {
        "recipe": config.run.name,
        "model": config.model.name,
        **{name: getattr(progress, name) for name in _PROGRESS},
        "epochs": training.plan.epoch_at(progress.step),
        "steps": progress.step,
        "world_size": training.plan.world_size,
        "global_batch_size": training.sizes.global_batch,
        "batch_size": training.sizes.micro_batch,
        "accumulation": training.sizes.accumulation,
        "state_bytes_per_parameter": optimizer_state,
        "exchange_state_bytes_per_parameter": exchange_state,
        "exchange_bytes_per_step": training.step.exchange_bytes(),
        "steps_s": progress.step_s,
        "target_top1": config.run.target_top1,
        "stopped_by": result.stopped_by,
        "noise_scale": NoiseScale(*progress.noise).value,
        "input_counters": counters,
        "resumed_at_steps": progress.resumes,
        "weights_sha256": weights,
        "exchange_state_bytes": training.step.strategy.state_bytes,
        "seed": config.run.seed,
        "chosen": training.chosen,
        "versions": versions(),
        "hardware": hardware(training.group.device),
        **training.step.strategy.summary(),
    }


def salvage(training: Training, loop: TrainingLoop, error: PeerError) -> None:
    """Saves the state of this rank after the loss of another rank, as `step-N.salvaged.pt`.

    Weights, momenta and loss scale are equal on all ranks after every completed step. Batch-norm
    statistics differ between ranks; the checkpoint contains those of this rank, and its number.
    Training never reads running statistics, so the weights of a resumed run are exact, but evaluations
    differ until the statistics are replaced. A regular checkpoint is never overwritten. The deadline
    of the watchdog limits the time. Errors in this function are ignored, because they must not hide
    `error`.

    Args:
        training: The run.
        loop: The training loop of the run.
        error: The error with which this rank ends.
    """
    if not training.step.strategy.same_weights:
        return
    training.group.leaving(error)
    training.finish_save()
    with contextlib.suppress(Exception):
        checkpoint = _last_completed_step(training, loop)
        if checkpoint is not None:
            _write_salvaged(training, checkpoint)


def _last_completed_step(training: Training, loop: TrainingLoop) -> Checkpoint | None:
    """Returns a checkpoint of this rank's last completed step; None if its state may be wrong."""
    step, progress = training.step, training.progress
    if step.under_way and training.group.backend == "nccl":
        # The queued update follows an exchange that NCCL aborts, so the update's input is undefined.
        return None
    if not _device_answers(training.group.device):
        return None
    loop.collect()
    step.roll_back()
    # `_write_salvaged` checks, with the lock held, whether rank 0 has saved this step before it died.
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


def _write_salvaged(training: Training, checkpoint: Checkpoint) -> None:
    """Writes the checkpoint that this rank saves alone, unless the folder has a newer or better one.

    If rank 0 survives, it still holds the lock of the folder. If rank 0 was lost, the checkpoint of
    the lowest surviving rank stays, in whatever order the surviving ranks get the lock.
    """
    store, rank = training.store, training.group.rank
    lock = None
    if training.is_main:
        training.check_folder()
    elif (training.folder.path / "config.toml").is_file():
        time.sleep(min(rank * _RANK_WAIT_S, _MOST_WAIT_S))
        lock = RunLock.acquire(training.folder.path, wait_s=_LOCK_WAIT_S)
    else:
        return  # this node does not share the folder with rank 0
    try:
        path = store.salvaged_path(checkpoint.step)
        newest = max(store.steps(), default=-1)
        if newest >= checkpoint.step or max(store.salvaged_steps(), default=-1) > checkpoint.step:
            return
        if path.is_file() and (Checkpoint.read(path).salvaged_by or 0) < rank:
            return
        checkpoint.write(path)
        text = f"salvaged step {checkpoint.step} after the loss of another rank: {path} "
        training.emit(NoteEvent(f"{text}(batch-norm statistics of rank {rank} only)"))
    finally:
        if lock is not None:
            lock.release()
