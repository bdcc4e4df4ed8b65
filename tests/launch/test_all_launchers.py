"""Whoever starts the ranks, by the scripts of examples/launch, they do the same job to the last bit."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cli_runs import events, summary
from cli_runs import started as forked
from launch.jobs import (
    DISTURB_AT,
    EXAMPLES,
    ROOT,
    TOTAL_STEPS,
    assert_nothing_left,
    called,
    ranks_of,
    reached_step,
    run,
    stand_in,
    started,
    training,
)
from ranks import free_port

FIGURES = ("top1", "val_loss")


def assert_same(
    output: Path, reference: dict[str, Any], launcher: str, figures: Sequence[str] = FIGURES
) -> None:
    found = summary(output)
    assert found["chosen"]["launcher"] == launcher
    for name in ("weights_sha256", "world_size", "steps", *figures):
        assert found[name] == reference[name], name


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The summary of `paceline train --nproc-per-node 2`, undisturbed, which all others must equal."""
    folder = tmp_path_factory.mktemp("reference")
    # No rank takes a module from the current directory, which may be a foreign run folder.
    (folder / "json.py").write_text("raise SystemExit('json.py of the current directory')\n")
    command = [sys.executable, "-P", "-m", "paceline", *training(folder / "run")]
    done = run([*command, "--nproc-per-node", "2"], folder)
    assert (done.code, done.err) == (0, ""), done.out
    found = summary(folder / "run")
    assert (found["world_size"], found["steps"]) == (2, TOTAL_STEPS)
    assert_nothing_left(folder)
    return found


# Rank 1 stands still in a step until it is killed, however slow its killer is; the one after it does not.
WAITS = "faults.at_micro_batch({}, 1, functools.partial(faults.await_file, pathlib.Path({!r})))"


def in_each_rank(folder: Path, statement: str) -> str:
    """A `PYTHONPATH` with which every rank begins with a statement on `faults`."""
    folder.mkdir()
    head = "import os\nif 'RANK' in os.environ:\n    import functools, pathlib, faults\n"
    (folder / "sitecustomize.py").write_text(f"{head}    {statement}\n")
    return os.pathsep.join([str(folder), str(ROOT / "src"), str(ROOT / "tests")])


def test_torchrun_goes_on_after_a_killed_rank(tmp_path: Path, reference: dict[str, Any]) -> None:
    """Two agents: one sees the failure and starts its rank anew, the other sees it join anew. Ranks go
    on by themselves from the last checkpoint."""
    place = {"NODES": "2", "RANKS_PER_NODE": "1", "HEAD_NODE": "localhost", "MAX_RESTARTS": "1"}
    place["PORT"] = str(free_port())
    output, killed = tmp_path / "run", tmp_path / "killed"
    place["PYTHONPATH"] = in_each_rank(tmp_path / "site", WAITS.format(DISTURB_AT, str(killed)))
    script = ["bash", str(EXAMPLES / "torchrun_multi_node.sh"), *training(output)[1:]]
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(started(script, tmp_path, **place)) for _ in range(2)]
        nodes[0].wait_until(reached_step(output))
        os.kill(ranks_of(tmp_path)[1], signal.SIGKILL)
        killed.touch()
        for node in nodes:
            done = node.wait()
            assert done.code == 0, done.err
    # A salvaged checkpoint holds one rank's batch-norm statistics, which change evaluations.
    assert_same(output, reference, "torchrun", figures=())
    (resumed,) = summary(output)["resumed_at_steps"]
    assert resumed >= 10
    begun = events(output, "start")
    assert len(begun) == 2
    file = Path(begun[1]["resumed_from"]).name
    assert file.removesuffix(".pt").removesuffix(".salvaged") == f"step-{begun[1]['step']:08d}"


def test_mpirun(tmp_path: Path, reference: dict[str, Any]) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here: install openmpi-bin (tools/install_system_packages.sh)")
    # For a test as root in a small container; users' machines need none of these.
    small = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    small["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    small["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    place = {"RANKS_PER_NODE": "2", "MASTER_PORT": str(free_port())}
    script = ["bash", str(EXAMPLES / "mpirun.sh"), *training(tmp_path / "run")[1:]]
    done = run(script, tmp_path, **small, **place)
    assert done.code == 0, done.err
    assert_same(tmp_path / "run", reference, "openmpi")
    # mpirun gives rank 0 a terminal, but what it shows goes to a file here.
    assert "\x1b" not in done.out
    assert f"step 30/{TOTAL_STEPS}" in done.out


def test_slurm(tmp_path: Path, reference: dict[str, Any]) -> None:
    """What the script asks of srun, by two forks with the variables that SLURM gives its tasks."""
    job = {"SLURM_JOB_ID": str(free_port()), "SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "1"}
    users = training(tmp_path / "run")[1:]
    argv, env = called(tmp_path, "slurm.sbatch", "srun", users, **job)
    given = {name: value for name, value in env.items() if name.startswith("SLURM_")}
    given |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NODEID": "0"}
    given["SLURM_STEP_TASKS_PER_NODE"] = "2"
    arguments = argv[argv.index("paceline") + 1 :]
    with contextlib.ExitStack() as stack:
        tasks = [
            stack.enter_context(
                forked(arguments, tmp_path, **given, SLURM_PROCID=n, SLURM_LOCALID=n)
            )
            for n in ("0", "1")
        ]
        for task in tasks:
            done = task.wait()
            assert done.code == 0, done.err
    assert_same(tmp_path / "run", reference, "slurm")


@pytest.mark.parametrize(("code", "requeued"), [(140, True), (143, False), (1, False), (0, False)])
def test_a_slurm_job_that_was_stopped_goes_back_into_the_queue(
    tmp_path: Path, code: int, requeued: bool
) -> None:
    stand_in(tmp_path / "bin", "srun", f"#!/bin/sh\nexit {code}\n")
    path = stand_in(tmp_path / "bin", "scontrol", f'#!/bin/sh\necho "$@" >{tmp_path}/asked\n')
    script = ["bash", str(EXAMPLES / "slurm.sbatch"), "quickstart"]
    assert run(script, tmp_path, PATH=path, SLURM_JOB_ID="77").code == code
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 77\n" if requeued else "")
