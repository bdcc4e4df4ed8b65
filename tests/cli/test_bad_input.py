"""Mistakes in flags and recipes, and ranks that differ or fail: one line, the same on every rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import faults
from cli_runs import Call, Done, run_two, small, started_ranks
from paceline.plan.plan_file import ClusterFacts, PlanFile
from paceline.plan.size_table import SizeTable
from paceline.train.step_time import step_seconds
from small_runs import tiny_plan

HYBRID = (
    "--set", "comm.algorithm=hybrid", "--set", "comm.hybrid.sizes=64", "--set", "comm.fusion_mib=0.25",
)  # fmt: skip


def same_line(done: list[Done], code: int | None = None) -> str:
    """The error of all ranks."""
    assert code is None or [rank.code for rank in done] == [code] * len(done)
    lines = {rank.error_line() for rank in done}
    assert len(lines) == 1, lines
    return lines.pop()


@pytest.mark.parametrize("part", ["paceline-data", "paceline-watchdog"])
def test_a_rank_whose_system_starts_no_thread_is_named(tmp_path: Path, part: str) -> None:
    for done in run_two(small(), tmp_path, [None, partial(faults.no_thread, part)]):
        assert "cannot start another thread" in done.error_line()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--nproc-per-node 99999999999999999999", "--nproc-per-node"),
        ("imagnet-resnet50", "did you mean 'imagenet-"),
        ("nowhere.toml", "recipe = 'nowhere.toml'"),
        ("--set data.image_size=big", "data.image_size = 'big'"),
        ("--set optimizer.lr=1", "did you mean 'optim'?"),
        ("--learning-rate 1", "--learning-rate"),
        ("--device cpu --set run.cuda_graphs=on", "run.cuda_graphs = 'on'"),
        ("quickstart -b 100", "use 100 or 200, or --batch-size 64 or 128"),
        ("--nproc-per-node 2 --min-ranks 3", "comm.min_ranks = 3"),
        ("--device cuda", "run.device = 'cuda'"),
        ("--resume nowhere.pt", "nowhere.pt"),
    ],
)
def test_mistakes_in_flags(call: Call, arguments: str, words: str) -> None:
    if "--device cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = call("train", *arguments.split())
    assert words in done.error_line()
    assert done.code == (1 if "nowhere.p" in arguments else 2)
    assert not list(Path("runs").glob("*/config.toml"))


@pytest.mark.parametrize(
    "arguments",
    [
        "--set run.strategy=unequal --set run.unequal.shares=1:2:3",
        "--set run.strategy=synced_norms --set run.synced_norms.ranks=3",
        "quickstart-halp --set data.flip=true",
        "quickstart-halp --amp-dtype bf16",
        "--set optim.schedule=one_cycle --warmup-epochs 3",
        "--set run.strategy=rehearsal --set run.rehearsal.nodes=2 --nproc-per-node 2",
    ],
)
def test_a_dry_run_refuses_what_training_refuses(call: Call, arguments: str) -> None:
    refused = call("train", *arguments.split())
    dry = call("train", *arguments.split(), "--dry-run")
    assert dry.error_line() == refused.error_line()
    assert (dry.code, refused.code) == (2, 2)
    assert dry.out == ""


def test_a_dry_run_counts_the_ranks_that_it_is_given(call: Call, tmp_path: Path) -> None:
    table = tmp_path / "sizes.toml"
    PlanFile(sizes=SizeTable.two_way(65536), cluster=ClusterFacts(2, 1)).write(table)
    sizes = ["--set", "comm.algorithm=hybrid", "--set", f"comm.hybrid.sizes={table}"]
    unequal = ("--set", "run.strategy=unequal", "--set", "run.unequal.shares=1:3")
    done = call(*small(*sizes, *unequal, "--dry-run", "--nproc-per-node", "2"))
    assert (done.code, done.err) == (0, "")
    assert "exchange: between 2 ranks: algorithm hybrid" in done.out
    assert "no effect" not in done.out
    other = ("--global-batch-size", "24", "--dry-run", "--nproc-per-node", "3")
    assert "comm.hybrid.sizes" in call(*small(*sizes, *other)).error_line()
    assert "run.unequal.shares" in call(*small(*unequal, *other)).error_line()
    alone = call(*small("--set", "run.strategy=asynchronous", "--dry-run")).out
    assert "no effect: run.strategy = 'asynchronous'" in alone


@pytest.mark.parametrize(
    "flags",
    [
        "--set run.noise_scale=true --nproc-per-node 2",
        "--set run.strategy=rehearsal --set run.rehearsal.nodes=1 --set run.rehearsal.gpus_per_node=2",
    ],
)
def test_a_dry_run_refuses_wires_of_a_plan(call: Call, flags: str) -> None:
    tiny_plan("int8", Path(), 2)
    done = call(*small("--set", "comm.plan=plan.toml", "--dry-run", *flags.split()))
    assert "comm.plan" in done.error_line()
    assert "buckets in int8" in done.error_line()
    assert done.code == 2


def test_a_dry_run_counts_an_update_once_a_step() -> None:
    """Not once for each part of the images that it measures."""
    # Five steps of 1.5 s after two that warm up, each with a quarter of the images.
    assert step_seconds([9.0, 9.0, *[1.5] * 5], [3.0, 3.0, *[0.5] * 5], 4) == (4.0, 0.5)
    # A first step that takes too long is the only one.
    assert step_seconds([9.0], [3.0], 1) == (6.0, 3.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[runs]\nepochs = 3\n", "did you mean 'run'?"),
        ("\xff\xfe", "recipe = 'own.toml': is not TOML"),
        ("[data]\nmean = [0.1, 0.2]\n", "data.mean = (0.1, 0.2)"),
    ],
)
def test_mistakes_in_a_recipe(call: Call, text: str, words: str) -> None:
    Path("own.toml").write_bytes(text.encode("latin-1"))
    done = call("train", "own.toml")
    assert words in done.error_line()
    assert done.code == 2


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ((), ("--smoothing", "0.2"), "run.smoothing: 0.1 on rank 0, 0.2 on rank 1"),
        (("-b", "5"), ("-b", "5"), "--batch-size"),
    ],
)
def test_settings_that_differ_or_do_not_fit_the_ranks(
    tmp_path: Path, first: tuple[str, ...], second: tuple[str, ...], words: str
) -> None:
    arguments = small("--output", "run")
    done = run_two([*arguments, *first], tmp_path, second=[*arguments, *second])
    assert words in same_line(done, 2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(partial(faults.freeze, "fc.bias"), "trained parameters", id="parameters"),
        pytest.param(partial(faults.other_plan, 1 << 20), "plan", id="plans"),
        pytest.param(partial(faults.other_version, "paceline", "0.0.1"), "paceline", id="paceline"),
        pytest.param(faults.no_memory_for_gradients, "rank 1: out of memory", id="memory"),
    ],
)
def test_a_rank_that_differs_from_the_others(tmp_path: Path, fault: Any, words: str) -> None:
    done = run_two(small("--output", "run", *HYBRID), tmp_path, [None, fault])
    assert words in same_line(done)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("training", "words"),
    [(True, "rank 1: out of memory at step 1"), (False, "rank 1: out of memory")],
)
def test_out_of_memory_on_one_rank(tmp_path: Path, training: bool, words: str) -> None:
    fault = partial(faults.out_of_memory, 1, training=training)
    line = same_line(run_two(small("--output", "run"), tmp_path, [None, fault]), 1)
    assert line.startswith(words)
    if training:
        assert "--batch-size 4" in line, "the remedy"


def test_a_bug_on_one_rank_is_named_on_the_other(tmp_path: Path) -> None:
    done = run_two(small("--output", "run"), tmp_path, [None, _break])
    assert done[0].error_line().startswith("rank 1: ZeroDivisionError: ")
    assert done[1].code == 1
    assert "Traceback" in done[1].err


def _break() -> None:
    faults.at_micro_batch(2, 1, lambda: 1 // 0)


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    arguments = small("--output", "run", "--set", "comm.rendezvous_timeout_s=2.0")
    with started_ranks([arguments, ["--version"]], tmp_path) as ranks:
        assert "rank 1" in ranks[0].wait().error_line()
