"""Whole commands on several NCCL ranks: they end, with what they promise, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.one_gpu import start_mps
from nccl.jobs import (
    ROOT,
    check_quiet,
    environment,
    finished,
    needs_gpu,
    start,
    torchrun,
    train,
    wait_for_steps,
)

pytestmark = [*needs_gpu, pytest.mark.timeout(180)]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize(
    ("nodes", "settings"),
    [
        ((2,), []),
        ((4,), ["--amp-dtype", "bf16"]),
        ((2, 2), ["--set", "comm.algorithm=hierarchical", "--set", "comm.overlap=on"]),
        ((3, 1), ["--set", "comm.algorithm=hybrid", "--set", "comm.hybrid.sizes=64",
                  "--set", "comm.wire=float16"]),
    ],
    ids=["default", "four", "hierarchical", "ragged-hybrid"],
)  # fmt: skip
def test_a_run_trains_evaluates_saves_and_ends(
    nodes: tuple[int, ...], settings: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    finished(nodes, train(run, "--epochs", "2", *settings), tmp_path)
    found = summary(run)
    native = not any("comm.algorithm" in text for text in settings)
    assert ("in the CUDA graph" in found["chosen"]["exchange"]) == native
    assert found["stopped_by"] == "finished"
    assert found["world_size"] == sum(nodes)
    assert found["chosen"]["backend"] == "nccl"
    assert found["top1"] > 60
    assert list((run / "checkpoints").glob("step-*.pt"))


def test_an_early_target_ends_all_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished((2,), train(run, "--epochs", "5", "--target-top1", "30"), tmp_path)
    assert summary(run)["stopped_by"] == "target"


def test_a_trace_has_all_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished((2,), train(run, "--epochs", "1", "--trace"), tmp_path)
    events = json.loads((run / "trace.json").read_text())
    rows = events["traceEvents"] if isinstance(events, dict) else events
    assert len({row["pid"] for row in rows if "pid" in row}) >= 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_run_resumes(number: signal.Signals, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = train(run, "--epochs", "8")
    job = start((2,), words, tmp_path / "first")
    wait_for_steps(job, run / "metrics.jsonl", 40)
    for process in job.processes:
        process.send_signal(number)
    assert job.wait(60) == [128 + number] * 2
    check_quiet(job)
    finished((2,), [*words, "--resume", "auto"], tmp_path / "second")
    found = summary(run)
    assert found["stopped_by"] == "finished"
    assert len(found["resumed_at_steps"]) == 1


def test_tune_writes_a_table_and_training_uses_it(tmp_path: Path) -> None:
    table = tmp_path / "sizes.toml"
    tune = ["-m", "paceline", "tune", "--share-gpus", "-o", str(table), "--accept-noise", "--limit-s",
            "15", "--max-bytes", "4MiB", "--iterations", "5"]  # fmt: skip
    finished((2, 2), tune, tmp_path / "tune", limit_s=150)
    finished(
        (2, 2),
        train(tmp_path / "run", "--epochs", "1", "--set", "comm.algorithm=hybrid", "--set",
              f"comm.hybrid.sizes={table}"),
        tmp_path / "train",
    )  # fmt: skip


@pytest.mark.parametrize("what", ["allreduce", "exchange"])
def test_bench(what: str, tmp_path: Path) -> None:
    flags = {
        "allreduce": ["--bytes", "4KiB,4MiB", "--iterations", "5"],
        "exchange": ["--model", "resnet18", "--iterations", "3"],
    }
    program = ["paceline", "bench", what] if what == "allreduce" else [f"benchmarks.{what}"]
    command = ["-m", *program, "--share-gpus", "--json", *flags[what]]
    rows = json.loads(finished((2, 2), command, tmp_path))["rows"]
    assert len(rows) > 4


@pytest.mark.parametrize("name", ["ddp_hook", "accelerate_hook", "lightning_hook"])
def test_examples(name: str, tmp_path: Path) -> None:
    needed = {
        "accelerate_hook": ["accelerate"], "lightning_hook": ["lightning", "pytorch_lightning"],
    }.get(name, ["torch"])  # fmt: skip
    if not any(find_spec(package) for package in needed):
        pytest.skip(f"{needed[0]} is not installed")
    script = str(ROOT / "examples" / f"{name}.py")
    job = start((2,), [script, "--device", "cuda", "--backend", "nccl"], tmp_path)
    assert job.wait(90) == [0, 0], job.log(0)[-2000:] + job.log(1)[-2000:]
    assert "weights equal on all ranks" in job.log(0)


def test_under_torchrun_by_the_wrapper(tmp_path: Path) -> None:
    job = torchrun(2, train(tmp_path / "run", "--epochs", "1"))
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output[-3000:]
    assert summary(tmp_path / "run")["chosen"]["backend"] == "nccl"


def test_our_own_launcher_needs_the_setting_alone(tmp_path: Path) -> None:
    start_mps()
    words = [*train(tmp_path / "run", "--epochs", "1"), "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *words], env={**os.environ, **environment()},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert summary(tmp_path / "run")["world_size"] == 2


@pytest.mark.parametrize("nodes", [(2,), (4,)], ids=["two", "four"])
def test_shared_products_of_muon_run_inside_the_cuda_graph(
    nodes: tuple[int, ...], tmp_path: Path
) -> None:
    """Ranks of one GPU gain nothing, but the captured all-gather is the same as on several."""
    found = {}
    for share in ("off", "on"):
        run, settings = tmp_path / share, ["--opt", "muon", "--amp-dtype", "bf16"]
        settings += ["--set", f"optim.muon.share_products={share}", "--set", "run.cuda_graphs=on"]
        finished(nodes, train(run, "--epochs", "2", *settings), tmp_path)
        found[share] = summary(run)
    assert f"shared by {sum(nodes)} ranks" in found["on"]["chosen"]["optimizer"]
    # All ranks have equal bits, which every run checks at its end; two runs on a GPU may differ.
    assert abs(found["on"]["top1"] - found["off"]["top1"]) < 5
    assert found["on"]["top1"] > 60
