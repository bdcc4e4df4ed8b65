"""Continues a run after ranks were lost: makes the remaining ranks equal, and repeats the step.

An update needs the gradients of all ranks. So when a rank is lost, the remaining ranks (survivors)
differ by at most one update, because the all-reduces of a step may have completed on some ranks only.
A rank that is behind takes over weights and optimizer state of one that is ahead, and the results of
the step. If no survivor has made the update, all repeat the step. docs/checkpoints.md lists what
happens to each piece of state.
"""

from __future__ import annotations

import io
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch

from paceline.comm.process_groups import all_gather_json
from paceline.comm.transport import create_transport
from paceline.core.errors import RunError
from paceline.core.events import GenerationEvent, NoteEvent
from paceline.core.units import plural
from paceline.models import load_tensors
from paceline.train.checkpoint import Checkpoint
from paceline.train.loop import TrainingLoop
from paceline.train.run_state import Progress
from paceline.train.training import Training


class _Report(NamedTuple):
    """What remaining ranks compare: their completed, evaluated and saved steps, and a save request."""

    step: int
    evaluated_step: int
    saved_step: int
    save_owed: bool


def recover(training: Training, loop: TrainingLoop) -> None:
    """Connects the remaining ranks, makes their state equal, and prepares the next step.

    All remaining ranks call this.

    Args:
        training: The run, whose collectives have failed on all remaining ranks.
        loop: Its training loop.

    Raises:
        LostMemberError: If another member is lost during the call; call this function again.
        RunError: If fewer than `comm.min_ranks` are left. The last completed step is saved.
        PeerError: If the survivors cannot continue.
    """
    started, group = time.perf_counter(), training.group
    before = group.generation
    group.regroup()
    now = group.generation
    assert before is not None
    assert now is not None
    repeated = _equalize(training, loop)
    _reconnect(training)
    loop.forget_times()
    lost = sorted(set(before.members) - set(now.members))
    training.emit(
        GenerationEvent(
            step=training.progress.step,
            generation=now.number,
            ranks=group.world_size,
            lost=lost,
            cause=group.describe_losses(),
            repeated=repeated,
            recover_s=time.perf_counter() - started,
        )
    )
    least = training.config.comm.min_ranks
    if group.world_size < least:
        loop.save()
        raise RunError(
            f"{plural(group.world_size, 'rank')} of comm.min_ranks = {least} are left "
            f"({group.describe_losses()})",
            "continue with --resume auto on any number of ranks",
        )


def _equalize(training: Training, loop: TrainingLoop) -> bool:
    """Gives all remaining ranks the state after the last step that any of them has completed.

    Returns:
        True if a step under way has to be repeated.
    """
    group, step, progress = training.group, training.step, training.progress
    own = _Report(progress.step, progress.evaluated_step, training.saved_step, loop.save_owed)
    gathered = group.watched("the comparison of the last step", lambda: all_gather_json(own))
    reports = [_Report(*report) for report in gathered]
    last = max(report.step for report in reports)
    ahead = [rank for rank, report in enumerate(reports) if report.step == last]
    if len(ahead) < len(reports):
        _catch_up(training, loop, ahead[0], is_behind=own.step < last)
    repeated = step.is_unfinished
    step.roll_back()
    # An evaluation or a save that some rank has not completed is repeated by all.
    model = min(ahead, key=lambda rank: reports[rank].evaluated_step)
    table = json.dumps(asdict(progress)).encode()
    agreed = Progress(**json.loads(group.broadcast_bytes(table, model)))
    vars(progress).update(vars(agreed))
    training.saved_step = min(report.saved_step for report in reports)
    loop.save_owed = any(report.save_owed for report in reports)
    return repeated


def _catch_up(training: Training, loop: TrainingLoop, source: int, *, is_behind: bool) -> None:
    """Gives the ranks that are one step behind the state and the results of rank `source`."""
    group, state, step = training.group, training.state, training.step
    content: bytes | memoryview | None = None
    outcome = io.BytesIO()
    if group.rank == source:
        content = state.capture_alone(training.progress).to_bytes()
        torch.save({"row": step.last_row}, outcome)
    content = group.broadcast_bytes(content, source)
    row = load_tensors(io.BytesIO(group.broadcast_bytes(outcome.getvalue(), source)))["row"]
    if not is_behind:
        return
    norms = state.batch_norm
    statistics, tracked = norms.kept.clone(), norms.kept_tracked.clone()
    place = Path(f"state of rank {source}")
    state.restore(Checkpoint.from_bytes(content, place), place)
    norms.kept.copy_(statistics)
    norms.kept_tracked.copy_(tracked)
    step.complete(row)
    loop.collect()


def _reconnect(training: Training) -> None:
    """Creates gradient exchange, batch plan and loader for the remaining ranks."""
    group, step, exchange = training.group, training.step, training.step.exchange
    if (memory := exchange.memory) is not None:
        training.emit(NoteEvent(f"the {memory.kind} of all ranks are dropped"))
    plan = replace(training.plan, world_size=group.world_size)
    transport = create_transport(group, training.config.comm, exchange.plan)
    exchange.renew(transport, accumulate=plan.accumulation > 1)
    if exchange.memory is not None:
        exchange.memory.scale = step.scale.step_value
    training.state = replace(training.state, memory=exchange.memory)
    training.trace.drop()
    training.replace_plan(plan)
