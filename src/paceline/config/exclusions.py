"""Refused combinations of settings in several sections, and of settings with facts about the job.

Facts are the fields of `Job`, as in `job.device`, and the objects of the program, as in
`program.augment`. Combinations within a section are in its settings module.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.exclusions import Exclusion, not_in, one_of


@dataclass(frozen=True, kw_only=True)
class Job:
    """Facts about the job that are known before the data is open.

    Attributes:
        processes: Number of processes.
        device: Type of their devices, `cpu` or `cuda`; empty if it is unknown.
    """

    processes: int
    device: str = ""


EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion(
        "optim.scaling", one_of("auto"), {"program.optimizer": not_in(None)},
        "the rule does not support an optimizer given in Python",
        "name one of lars, muon, sgd, adamw and lamb, or use 'off'",
    ),
)  # fmt: skip
