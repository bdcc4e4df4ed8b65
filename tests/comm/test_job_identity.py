"""Which processes may be ranks of one job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.comm.job_identity import JobIdentity
from paceline.core.topology import Topology

SETTINGS = {"run.seed": 1, "run.trace_steps": (10, 30)}


def identity(launcher: str, settings: Any = None, world_size: int = 2, **env: str) -> JobIdentity:
    topology = Topology(0, world_size, 0, world_size, launcher=launcher)
    return JobIdentity.from_env(env, topology, settings)


@pytest.mark.parametrize(
    ("launcher", "env", "job_id"),
    [
        ("torchrun", {"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "3"}, "abc"),
        ("torchrun", {"TORCHELASTIC_RUN_ID": "none"}, ""),  # what torchrun says without --rdzv-id
        ("openmpi", {"PMIX_NAMESPACE": "2048", "OMPI_COMM_WORLD_RANK": "1"}, "2048"),
        ("openmpi", {"OMPI_MCA_ess_base_jobid": "77"}, "77"),
        ("slurm", {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, "12.0"),
        ("slurm", {"SLURM_JOB_ID": "13", "SLURM_HET_JOB_ID": "12", "SLURM_STEP_ID": "0"}, "12"),
        ("mpi", {"PMI_RANK": "0"}, ""),
        ("environment", {"TORCHELASTIC_RUN_ID": "inherited"}, ""),
        ("environment", {"PACELINE_JOB_ID": "mine"}, "mine"),
        ("slurm", {"PACELINE_JOB_ID": "mine", "SLURM_JOB_ID": "12"}, "mine"),
    ],
)
def test_the_launchers_id_is_the_jobs(launcher: str, env: dict[str, str], job_id: str) -> None:
    assert identity(launcher, **env).job_id == job_id


def test_known_ids_decide_whatever_the_settings() -> None:
    ours = identity("torchrun", SETTINGS, TORCHELASTIC_RUN_ID="a")
    assert ours.conflict(identity("torchrun", SETTINGS, TORCHELASTIC_RUN_ID="b"))
    other_settings = identity("torchrun", {"run.seed": 2}, TORCHELASTIC_RUN_ID="a")
    assert not ours.conflict(other_settings)
    assert ours.conflict(replace(other_settings, world_size=3))


def test_settings_decide_where_an_id_is_unknown() -> None:
    ours = identity("environment", SETTINGS)
    assert not ours.conflict(identity("environment", dict(SETTINGS)))
    assert not ours.conflict(identity("torchrun", dict(SETTINGS), TORCHELASTIC_RUN_ID="a"))
    theirs = identity("environment", {f"run.s{n}": n for n in range(5)})
    assert "and 4 more settings differ" in ours.conflict(theirs)
    assert not ours.conflict(identity("environment")), "a program without settings to compare"


def test_it_survives_the_way_through_the_store() -> None:
    ours = identity("slurm", SETTINGS, SLURM_JOB_ID="12", SLURM_STEP_ID="0")
    theirs = JobIdentity.from_table(ours.to_table())
    assert theirs == ours
    assert theirs.digest == ours.digest


def test_a_job_is_described_so_that_it_can_be_found() -> None:
    text = identity("slurm", SETTINGS, SLURM_JOB_ID="12", SLURM_STEP_ID="0").describe()
    assert text.startswith("slurm job 12.0 of 2 ranks, configuration ")
    assert "process " in text
    assert (
        identity("environment").describe().startswith("environment job without an id of 2 ranks,")
    )
