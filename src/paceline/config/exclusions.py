"""Declares which settings of different sections cannot be combined, or do not fit a job.

Facts are the fields of `Job`, as in `job.device`, and the Python objects of a program, as in
`program.augment`. Conflicts within a section are declared in the settings module of that section.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.exclusions import Exclusion


@dataclass(frozen=True, kw_only=True)
class Job:
    """The number of processes and the kind of device, which some settings do not support.

    Attributes:
        processes: The number of processes.
        device: The device type of the processes, `cpu` or `cuda`; empty if unknown.
    """

    processes: int
    device: str = ""


EXCLUSIONS: tuple[Exclusion, ...] = ()
