"""`JobIdentity`: which job a process belongs to, so that two jobs at one port do not mix.

In: the launcher's environment, the number of ranks and the settings that all ranks share. Out: a text
that a rank sends with its greeting, and the reason why two of them cannot be ranks of one job.

Every launcher but a bare environment gives its job an id of its own, and two known ids decide. Where one
is unknown, the settings decide. What may differ between ranks of one job is not compared: restart
counts (agents on several nodes do not count alike), hosts, and a node's own paths and worker counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.core.topology import Topology

_NAMED_SETTINGS = 3
# By launcher: the first of these variables that is set identifies the job.
_ID_VARIABLES = {
    "torchrun": ("TORCHELASTIC_RUN_ID",),
    "openmpi": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    "mpi": ("PMI_JOBID", "PALS_APID"),
}
# What torchrun calls every job that was not given a name with --rdzv-id.
_NO_RUN_ID = "none"


@dataclass(frozen=True)
class JobIdentity:
    """`job_id` is empty where the launcher gives none; `settings` where the program has none."""

    launcher: str
    job_id: str
    world_size: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    host: str = ""
    pid: int = 0

    @classmethod
    def from_env(
        cls, env: Mapping[str, str], topology: Topology, settings: Mapping[str, Any] | None = None
    ) -> JobIdentity:
        return cls(
            topology.launcher,
            _job_id(env, topology.launcher),
            topology.world_size,
            # As they arrive at the others: JSON knows no tuples.
            json.loads(json.dumps(dict(settings or {}), default=str)),
            socket.gethostname(),
            os.getpid(),
        )

    def to_table(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> JobIdentity:
        return cls(**table)

    @property
    def digest(self) -> str:
        """Of the settings."""
        text = json.dumps(self.settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def same_id(self, other: JobIdentity) -> bool | None:
        """None where one of the two is unknown."""
        return self.job_id == other.job_id if self.job_id and other.job_id else None

    def conflict(self, other: JobIdentity) -> str:
        """Why `other` is no rank of this job; empty where it may be one."""
        same = self.same_id(other)
        if same is False:
            return "their job ids differ"
        if self.world_size != other.world_size:
            return f"the number of ranks is {self.world_size} there and {other.world_size} here"
        if same is None and self.settings and other.settings and self.settings != other.settings:
            return self._differences(other)
        return ""

    def _differences(self, other: JobIdentity) -> str:
        names = sorted(
            name
            for name in self.settings.keys() | other.settings.keys()
            if self.settings.get(name) != other.settings.get(name)
        )
        shown = [
            f"{name} is {self.settings.get(name)!r} there and {other.settings.get(name)!r} here"
            for name in names[:_NAMED_SETTINGS]
        ]
        more = len(names) - _NAMED_SETTINGS
        return ", ".join(shown) + (f", and {more} more settings differ" if more > 0 else "")

    def describe(self) -> str:
        """`torchrun job 4711 of 2 ranks, configuration 1f3a5b7c, process 99 on node3`."""
        job_id = f" {self.job_id}" if self.job_id else " without an id"
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        configuration = f", configuration {self.digest}" if self.settings else ""
        return (
            f"{self.launcher} job{job_id} of {ranks}{configuration}, process {self.pid} on "
            f"{self.host}"
        )


def _job_id(env: Mapping[str, str], launcher: str) -> str:
    if env.get("PACELINE_JOB_ID"):
        return env["PACELINE_JOB_ID"]
    if launcher == "slurm":
        # The parts of a heterogeneous job have ids of their own, and one in common.
        if "SLURM_HET_JOB_ID" in env:
            return env["SLURM_HET_JOB_ID"]
        return f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}".strip(".")
    found = (env.get(name, "") for name in _ID_VARIABLES.get(launcher, ()))
    job_id = next(filter(None, found), "")
    return "" if launcher == "torchrun" and job_id == _NO_RUN_ID else job_id
