"""Ranks of one job find one another, and ranks of two jobs at one port do not mix."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from comm.conftest import RANK0, RANK1, check_shared, meet_all
from paceline.comm.agreement import ActiveClock
from paceline.comm.coordinator import GREETINGS, LOBBY, Coordinator
from paceline.comm.job import JobIdentity, RankHost
from paceline.comm.rendezvous import explain, meet
from paceline.core.errors import CommError
from paceline.core.host import DeferredEnd
from paceline.core.topology import Topology
from ranks import free_port

pytestmark = pytest.mark.usefixtures("new_processes")
SETTINGS = {"run.seed": 1, "run.traced_steps": (10, 30)}


def test_a_new_attempt_finds_nothing_of_the_last_in_the_agents_store(agent: TCPStore) -> None:
    before = meet_all(agent.port)
    before[1].store.set("verdict", "of the last attempt")
    after = meet_all(agent.port)
    assert not after[0].store.check(["verdict"])
    assert [meeting[0].restarted for meeting in (before, after)] == [False, True]


def test_the_greeting_of_a_dead_rank_is_no_rank(agent: TCPStore) -> None:
    with ThreadPoolExecutor(1) as pool:
        dead = pool.submit(meet, replace(RANK1, master_port=agent.port), 0.1)
        with pytest.raises(CommError):  # it has left its greeting, and gives up
            dead.result()
    with pytest.raises(CommError, match=r"rank 1 of 2 did not come to 127\.0\.0\.1:\d+ within 1 s"):
        meet(replace(RANK0, master_port=agent.port), timeout_s=1)
    check_shared(*meet_all(agent.port))


def test_a_rank_that_ends_as_the_last_one_comes_is_not_taken_for_present(agent: TCPStore) -> None:
    job, here = JobIdentity.from_env({}, RANK0), RankHost("here", "127.0.0.1")
    coordinator = Coordinator(agent, RANK0, job, here, True, DeferredEnd(active=False))
    greeting = {
        "token": "0" * 32, "rank": 1, "restarts": 0, "at": list(here), "job": job.to_table(),
        "leaves": "SIGTERM",
    }  # fmt: skip
    agent.queue_push(GREETINGS, json.dumps(greeting))
    agent.set(f"{LOBBY}/in/{coordinator._name}/all", "")
    with pytest.raises(CommError, match="rank 1 was ended by SIGTERM before all ranks had met"):
        coordinator.admit_all(5, ActiveClock())


def test_one_agent_that_counts_a_restart_is_enough(
    agent: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meet, replace(RANK1, master_port=agent.port), 100)
        while not agent.queue_len("paceline-lobby/greetings"):
            time.sleep(0.01)
        # The two run in one process here; by now rank 1 has said what its own agent counts.
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        assert meet(replace(RANK0, master_port=agent.port), 100).restarted
        other.result()


def test_a_port_in_use_is_named_with_a_remedy() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(CommError) as caught:
            meet(replace(RANK0, master_port=port), timeout_s=5)
    assert f"127.0.0.1:{port} is in use" in str(caught.value)
    assert "MASTER_PORT" in caught.value.remedy


def test_a_rank_0_that_never_comes_is_not_waited_for_longer(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(
        CommError, match="rank 1 did not meet the other ranks at 127.0.0.1:1 within 1 s"
    ):
        meet(replace(RANK1, master_port=1), timeout_s=1)
    # Nothing else is printed: torch's own message would be pages.
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("Permission denied"), "may not listen"),
        (RuntimeError("can't start new thread"), "cannot start another thread"),
        (RuntimeError("getaddrinfo failed: Name or service not known"), "cannot be resolved"),
        (socket.gaierror(-3, "Temporary failure in name resolution"), "cannot be resolved"),
        (ValueError("port must have value"), "is not an address"),
    ],
)
def test_other_causes_are_explained(error: Exception, message: str) -> None:
    cause, remedy = explain("host:80", RANK0, error, 5)
    assert message in cause
    assert remedy


@pytest.fixture
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PACELINE_JOB_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def waiting_rank_0(
    port: int, settings: dict[str, Any] | None = None, world_size: int = 2
) -> Iterator[Any]:
    """Starts rank 0 of a job whose rank 1 has not come yet."""
    topology = replace(RANK0, master_port=port, world_size=world_size, local_world_size=world_size)
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(meet, topology, 100, settings)


def wait_for_job(port: int) -> TCPStore:
    """Waits until rank 0 has published its job: later changes of the environment do not affect it."""
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.01)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store.wait(["paceline-lobby/job"], timedelta(seconds=100))
    return store


def test_a_rank_of_another_job_is_refused_at_once_and_the_right_one_joins(
    no_job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("PACELINE_JOB_ID", "4711")
    with waiting_rank_0(port) as first:
        wait_for_job(port)
        monkeypatch.setenv("PACELINE_JOB_ID", "4712")
        with pytest.raises(
            CommError, match=r"environment job 4711, .* environment job 4712,"
        ) as caught:
            meet(replace(RANK1, master_port=port), 300)
        assert "MASTER_PORT" in caught.value.remedy
        monkeypatch.setenv("PACELINE_JOB_ID", "4711")
        second = meet(replace(RANK1, master_port=port), 100)
        check_shared(first.result(), second)


@pytest.mark.parametrize(
    ("settings", "ranks", "conflict"),
    [(2, 2, "run.seed is 1 there and 2 here"), (1, 3, "number of ranks is 2 there and 3 here")],
)
def test_a_rank_with_other_settings_is_refused_and_rank_0_does_not_wait_for_ever(
    no_job: None, monkeypatch: pytest.MonkeyPatch, settings: int, ranks: int, conflict: str
) -> None:
    monkeypatch.setattr("paceline.comm.coordinator._REFUSED_S", 0.2)
    port = free_port()
    other = replace(RANK1, world_size=ranks, local_world_size=ranks, master_port=port)
    with waiting_rank_0(port, {"run.seed": 1}) as first:
        for attempt in (lambda: meet(other, 300, {"run.seed": settings}), first.result):
            with pytest.raises(CommError, match=conflict):
                attempt()


def test_a_place_is_taken_once(no_job: None) -> None:
    """The same job, started twice at one port: its second rank 1 must not join the first's."""
    port = free_port()
    first, _second = meet_all(port)
    with pytest.raises(CommError, match="all of its ranks have joined already"):
        meet(replace(RANK1, master_port=port), 300)
    first.store.set("key", "the store is still there")


def test_of_two_that_come_as_one_rank_only_one_joins(no_job: None) -> None:
    port = free_port()
    others = [replace(RANK1, master_port=port)] * 2
    with ThreadPoolExecutor(2) as pool, waiting_rank_0(port, world_size=2) as first:
        both = [pool.submit(meet, other, 100) for other in others]
        errors = [future.exception() for future in both]
        first.result()
    (error,) = (error for error in errors if error is not None)
    assert isinstance(error, CommError)
    assert "another job" in str(error)


def test_a_restart_with_other_ranks_is_no_other_job(
    agent: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An elastic agent may come back with fewer nodes; its store still has the former attempt."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    topologies = [replace(t, launcher="torchrun", master_port=agent.port) for t in (RANK0, RANK1)]
    for size in (2, 3, 2):
        ranks = [
            replace(topologies[0], rank=n, local_rank=n, world_size=size, local_world_size=size)
            for n in range(size)
        ]
        with ThreadPoolExecutor(size) as pool:
            # Rank 0 last: the others find the job that the former attempt published.
            later = [pool.submit(meet, rank, 100) for rank in ranks[1:]]
            time.sleep(0.2)
            later.append(pool.submit(meet, ranks[0], 100))
            for meeting in later:
                meeting.result()


def test_ranks_of_one_node_meet_where_no_other_host_can_come(no_job: None) -> None:
    port = free_port()
    met = meet_all(port)
    addresses = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")
    ]
    assert addresses == [f"0100007F:{port:04X}"]
    del met  # the store closes with it


def identity(launcher: str, settings: Any = None, world_size: int = 2, **env: str) -> JobIdentity:
    topology = Topology(0, world_size, 0, world_size, launcher=launcher)
    return JobIdentity.from_env(env, topology, settings)


@pytest.mark.parametrize(
    ("launcher", "env", "job_id"),
    [
        ("torchrun", {"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "3"}, "abc"),
        ("torchrun", {"TORCHELASTIC_RUN_ID": "none"}, ""),  # what torchrun says without --rdzv-id
        ("openmpi", {"PMIX_NAMESPACE": "2048", "OMPI_COMM_WORLD_RANK": "1"}, "2048"),
        ("slurm", {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, "12.0"),
        ("slurm", {"SLURM_JOB_ID": "13", "SLURM_HET_JOB_ID": "12", "SLURM_STEP_ID": "0"}, "12"),
        ("mpi", {"PMI_RANK": "0"}, ""),
        ("environment", {"TORCHELASTIC_RUN_ID": "inherited"}, ""),
        ("slurm", {"PACELINE_JOB_ID": "mine", "SLURM_JOB_ID": "12"}, "mine"),
    ],
)
def test_the_launchers_id_is_the_jobs(launcher: str, env: dict[str, str], job_id: str) -> None:
    assert identity(launcher, **env).job_id == job_id


def test_known_ids_decide_whatever_the_settings() -> None:
    ours = identity("torchrun", SETTINGS, TORCHELASTIC_RUN_ID="a")
    assert ours.conflict(identity("torchrun", SETTINGS, TORCHELASTIC_RUN_ID="b"))
    other_settings = identity("torchrun", {"run.seed": 2}, TORCHELASTIC_RUN_ID="a")
    assert not ours.conflict(other_settings), "left to the agreement"
    assert ours.conflict(replace(other_settings, world_size=3))


def test_settings_decide_where_an_id_is_unknown() -> None:
    ours = identity("environment", SETTINGS)
    assert not ours.conflict(identity("environment", dict(SETTINGS)))
    assert not ours.conflict(identity("torchrun", dict(SETTINGS), TORCHELASTIC_RUN_ID="a"))
    theirs = identity("environment", {f"run.s{n}": n for n in range(5)})
    assert "and 4 more settings differ" in ours.conflict(theirs)
    assert not ours.conflict(identity("environment")), "a program without settings to compare"
