"""torchrun starts failed ranks anew, and they go on by themselves from the last checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from cli_runs import events, summary
from launch.jobs import EXAMPLES, Job, ranks_of, reached_step, started, torchrun, training
from ranks import free_port


def kill_rank_1(job: Job, output: Path) -> None:
    job.wait_until(reached_step(output))
    os.kill(ranks_of(output.parent)[1], signal.SIGKILL)


def assert_went_on(output: Path, reference: dict[str, Any]) -> None:
    found = summary(output)
    assert len(found["resumed_at_steps"]) == 1
    assert found["resumed_at_steps"][0] >= 10
    assert found["weights_sha256"] == reference["weights_sha256"]
    begun = events(output, "start")
    assert len(begun) == 2
    file = Path(begun[1]["resumed_from"]).name
    assert file.removesuffix(".pt").removesuffix(".salvaged") == f"step-{begun[1]['step']:08d}"


def test_a_killed_rank_on_one_node(tmp_path: Path, reference: dict[str, Any]) -> None:
    command = torchrun("--nproc-per-node", "2", "--max-restarts", "1")
    with started([*command, *training(tmp_path / "run")], tmp_path) as job:
        kill_rank_1(job, tmp_path / "run")
        done = job.wait()
    assert done.code == 0, done.err
    assert_went_on(tmp_path / "run", reference)


def test_a_killed_rank_on_one_of_two_nodes(tmp_path: Path, reference: dict[str, Any]) -> None:
    """Only one of the two agents sees a failure and counts a restart; the other sees it join anew."""
    place = {"NODES": "2", "RANKS_PER_NODE": "1", "HEAD_NODE": "localhost", "MAX_RESTARTS": "1"}
    place["PORT"] = str(free_port())
    script = ["bash", str(EXAMPLES / "torchrun_multi_node.sh"), *training(tmp_path / "run")[1:]]
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(started(script, tmp_path, **place)) for _ in range(2)]
        kill_rank_1(nodes[0], tmp_path / "run")
        for node in nodes:
            done = node.wait()
            assert done.code == 0, done.err
    assert_went_on(tmp_path / "run", reference)
