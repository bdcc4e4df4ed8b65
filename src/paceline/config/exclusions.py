"""Combinations that are refused: settings of several sections, and settings with facts about the job.

Facts are those of `Job`, as in `job.device`, and the objects of the program, as in `program.augment`.
Rows of a single section are in its settings module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config.settings import SYNCHRONOUS
from paceline.core.exclusions import Exclusion, Test, above, not_in, one_of

_REHEARSAL = {"rehearse.nodes": above(0)}
# The value that switches a setting off, and what it is called in messages.
_OFF = {
    "optim.batch_schedule": ("", "batch growth"),
    "run.strategy": (SYNCHRONOUS, "run.strategy = {run.strategy!r}"),
    "run.trace": (False, "run.trace"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is known about the job before the data is open.

    Attributes:
        processes: Number of processes.
        device: Type of their devices, `cpu` or `cuda`; empty if it is not known yet.
    """

    processes: int
    device: str = ""


def _without(
    names: tuple[str, ...], when: Mapping[str, Test], mode: str, reason: str = ""
) -> list[Exclusion]:
    """Rows for settings that have to be off in a mode."""
    return [
        Exclusion(
            name, not_in(off), when, f"{title} is not supported with {mode}{reason and ': '}{reason}",
            f"use {name}={str(off).lower() if isinstance(off, bool) else off or repr(off)}",
        )
        for name in names
        for off, title in [_OFF[name]]
    ]  # fmt: skip


EXCLUSIONS: tuple[Exclusion, ...] = (
    # Averages and gradient noise.
    Exclusion(
        "run.average_epochs", not_in(0.0), {"optim.schedule_free": above(0)},
        "schedule-free training averages the weights itself", "use 0 with optim.schedule_free",
    ),
    # Rehearsals.
    Exclusion(
        "rehearse.nodes", above(0), {"job.processes": above(1)},
        "a rehearsal runs in one process, and this job has {job.processes}",
        "start it without a launcher",
    ),
    *_without(
        ("run.strategy", "optim.batch_schedule", "run.trace"), _REHEARSAL, "a rehearsal",
    ),
    Exclusion(
        "optim.scaling", one_of("auto"), {"program.optimizer": not_in(None)},
        "the rule does not know an optimizer given in Python",
        "name one of lars, muon, sgd, adamw and lamb, or use 'off'",
    ),
)  # fmt: skip
