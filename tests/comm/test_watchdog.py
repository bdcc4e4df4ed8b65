"""An exchange that stalls ends all ranks, in time, with one line that names bucket and rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import faults
from cli_runs import Done, small, started_ranks, steps
from paceline.comm import CommSettings, Group, create_transport
from paceline.comm.planned_transport import ThreadTransport
from paceline.comm.watchdog import beat_interval_s
from paceline.core.topology import Topology
from paceline.plan import FusionPlan
from ranks import run_ranks

CPU = torch.device("cpu")
TIMEOUT = ("--set", "comm.timeout_s=6")
PATIENT = partial(faults.patient_watchdog, 0.7)
SLEEP = partial(time.sleep, 600)
KILL = partial(faults.signal_self, signal.SIGKILL)
# The thread that asks for the stop may run on for a moment, on another core than the one that stops.
STOP = partial(faults.several, partial(faults.signal_self, signal.SIGSTOP), partial(time.sleep, 1))
RING = (
    "--set", "comm.algorithm=ring", "--set", "comm.fusion_mib=0.25", "-b", "4",
    "--global-batch-size", "12",
)  # fmt: skip


def run_three(arguments: list[str], cwd: Path, fault: Any) -> list[Done]:
    """Runs ranks 0 and 1 without a fault and rank 2 with one. All must end by themselves."""
    faults_of_ranks = [PATIENT, PATIENT, partial(faults.several, PATIENT, fault)]
    with started_ranks([arguments] * 3, cwd, faults_of_ranks) as ranks:
        return [process.wait() for process in ranks]


def test_a_rank_that_sleeps_is_named_with_the_first_bucket_and_ends_too(tmp_path: Path) -> None:
    fault = partial(faults.at_micro_batch, 2, 2, SLEEP)
    done = run_three(small("--output", "run", *TIMEOUT, *RING), tmp_path, fault)
    assert [rank.code for rank in done] == [1, 1, 1]
    lines = {rank.error_line().removeprefix("rank 0: ").removeprefix("rank 1: ") for rank in done}
    assert len(lines) == 1, lines
    (line,) = lines
    assert line.startswith("step 3: the exchange of bucket 1 of 6 (")
    assert " KiB, ring: fc.bias, fc.weight, layer3.1.bn2.weight and 2 more) stalled for " in line
    assert ": rank 2 did not arrive (computing step 3); look into rank 2's log" in line
    assert "comm.timeout_s = 6 sets the wait" in line


def test_a_rank_that_stops_in_the_middle_is_named_with_that_bucket(tmp_path: Path) -> None:
    """In the third bucket of its third step; its process then gives no sign of life."""
    arguments = small("--output", "run", *TIMEOUT, *RING)
    fault = partial(faults.at_message, 2 * 6 + 3, STOP)
    with started_ranks([arguments] * 3, tmp_path, [PATIENT, PATIENT, fault]) as ranks:
        done = [process.wait() for process in ranks[:2]]
        ranks[2].send(signal.SIGCONT)
        late = ranks[2].wait()
    for rank in done:
        line = rank.error_line()
        assert "step 3: the exchange of bucket 3 of 6 (" in line
        assert "rank 2 gives no sign of life (last seen" in line
    # Awake again, it finds that the others are gone, and does not stay behind.
    assert late.code == 1
    assert late.error_line()


def test_a_rank_that_is_killed_is_named_by_its_missing_heartbeat(tmp_path: Path) -> None:
    """The backend only reports that a connection broke, and ranks that leave next break more."""
    fault = partial(faults.at_micro_batch, 2, 2, KILL)
    arguments = small("--output", "run", *TIMEOUT, "-b", "4", "--global-batch-size", "12")
    done = run_three(arguments, tmp_path, fault)
    assert [rank.code for rank in done] == [1, 1, -signal.SIGKILL]
    for rank in done[:2]:
        assert "rank 2 gives no sign of life" in rank.error_line()


def test_a_rank_that_sleeps_in_an_evaluation(tmp_path: Path) -> None:
    """No exchange is under way, but the group's own collective; and rank 0 hosts the store."""
    arguments = small("--output", "run", "--epochs", "1", *TIMEOUT)
    fault = partial(faults.at_evaluation, 1, SLEEP)
    with started_ranks([arguments] * 2, tmp_path, [fault, PATIENT]) as ranks:
        done = [process.wait() for process in ranks]
    for rank in done:
        assert rank.code == 1
        line = rank.error_line()
        assert "all-reduce stalled for " in line
        assert "rank 0 did not arrive (after step 7)" in line


def test_a_slow_rank_that_is_in_time_disturbs_nobody(tmp_path: Path) -> None:
    """It takes long enough for the watchdog to look at the others, and less than the limit."""
    fault = partial(faults.at_micro_batch, 1, 1, partial(time.sleep, 5))
    arguments = small("--output", "run", "--epochs", "1", "--set", "comm.timeout_s=12")
    with started_ranks([arguments] * 2, tmp_path, [None, fault]) as ranks:
        assert [process.wait().code for process in ranks] == [0, 0]
    assert (tmp_path / "run/summary.json").exists()


def _threads_and_timeouts(rank: int) -> tuple[list[str], list[float]]:
    settings = CommSettings(timeout_s=5.0, algorithm="ring")
    before = set(threading.enumerate())  # tests before may have left some in this process
    with Group(Topology.from_env(os.environ), settings, CPU) as group:
        names = {thread.name for thread in threading.enumerate()}
        assert {"paceline-watchdog", "paceline-heartbeat"} <= names
        plan = FusionPlan.by_threshold([("weight", 4)], 0, algorithm="ring")
        transport = create_transport(group, settings, plan)
        assert isinstance(transport, ThreadTransport)
        groups = [dist.group.WORLD, transport.planned.groups.world]
        waits = [g._get_backend(CPU).options._timeout.total_seconds() for g in groups if g]
        transport.close()
    made = [t for t in set(threading.enumerate()) - before if t.name.startswith("paceline-")]
    for thread in made:
        thread.join(100)  # they have been asked to end, and a busy host lets them do so late
    return [t.name for t in made if t.is_alive()], waits


def test_a_healthy_group_leaves_no_thread_and_its_backend_outwaits_any_suspension() -> None:
    """The backend's clock goes on while the process is stopped, and it cannot name a rank."""
    for left, waits in run_ranks(2, _threads_and_timeouts):
        assert left == []
        assert len(waits) == 2
        assert min(waits) >= 24 * 3600


def test_a_job_that_is_suspended_as_a_whole_goes_on(tmp_path: Path) -> None:
    arguments = small("--output", "run", "--epochs", "200", *RING)
    arguments += ["--set", "comm.timeout_s=5", "--set", "checkpoint.interval_epochs=0"]
    with started_ranks([arguments] * 3, tmp_path) as ranks:
        ranks[0].wait_until(lambda: len(steps(tmp_path / "run")) > 5)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for rank in ranks:
                rank.send(number)
            if number == signal.SIGSTOP:
                time.sleep(7)
        before = len(steps(tmp_path / "run"))
        ranks[0].wait_until(lambda: len(steps(tmp_path / "run")) > before + 20)
        ranks[1].send(signal.SIGTERM)
        assert [rank.wait().code for rank in ranks] == [128 + signal.SIGTERM] * 3


@pytest.mark.parametrize(
    ("timeout_s", "ranks", "expected"),
    [
        (600.0, 8, 2.0),
        (600.0, 16_000, 4.0),
        (10.0, 1_000, 0.25),
        (10.0, 64_000, 0.5),  # seven of them have to fit into 40 % of the timeout
        (1.0, 8, 0.1),
    ],
)
def test_the_interval_grows_with_the_ranks_up_to_a_twentieth_of_the_timeout(
    timeout_s: float, ranks: int, expected: float
) -> None:
    assert beat_interval_s(timeout_s, ranks) == pytest.approx(expected)
