"""The programs of benchmarks/: JSON, tables, and mistakes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import ddp, exchange, input_pipelines, input_training, kernels, optimizer, step
from benchmarks.optimizer import device_times, measure_all
from benchmarks.program import run
from cli_runs import Done, is_launchers
from data_sets import write_shards
from ranks import run_ranks

TINY = ("--model", "resnet_tiny", "--device", "cpu")
STEP = (*TINY, "--image-size", "28", "--classes", "5", "-b", "2")
IMAGES = ("--image-size", "28", "-b", "4", "--rounds", "1", "--device", "cpu", "--data-dir")


def call(main: Callable[..., None], *words: str) -> Done:
    """Runs a program in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", [main.__module__, *words]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        run(main)
    code = ended.value.code
    return Done(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())


def report_of(main: Callable[..., None], *words: str) -> dict[str, Any]:
    done = call(main, *words, "--json")
    assert done.code == 0, done.err
    return dict(json.loads(done.out))


def on_rank(rank: int, main: Callable[..., None], words: tuple[str, ...]) -> dict[str, Any]:
    done = call(main, *words, "--json")
    assert done.code == 0, done.err
    return dict(json.loads(done.out)) if rank == 0 else {}


def on_two_ranks(main: Callable[..., None], *words: str) -> dict[str, Any]:
    return dict(run_ranks(2, on_rank, main, words)[0])


def test_kernels() -> None:
    words = (*STEP, "--steps", "1", "--warm-up", "1", "--top", "2")
    done = call(kernels.main, *words, "--set", "optim.name=sgd")
    assert done.code == 0, done.err
    assert "sgd, foreach" in done.out
    # Which rows come first follows the load of the host.
    assert done.out.count("%") == 2
    found = report_of(kernels.main, *words)
    assert {"convolution", "convolution_backward"} < {row["call"] for row in found["rows"]}
    assert found["settings"]["batch_size"] == 2


def test_optimizer() -> None:
    done = call(optimizer.main, *TINY, "--repeats", "2")
    assert done.code == 0, done.err
    assert "ours lars" in done.out


def test_all_updates_are_measured_and_the_bytes_are_those_of_one_update() -> None:
    found = measure_all("resnet_tiny", torch.device("cpu"), amp_dtype="fp32", repeats=2, warm_up=1)
    names = [row["name"] for row in found["rows"]]
    assert names == [
        "ours lars",
        "ours sgd",
        "ours muon",
        "ours adamw",
        "ours lamb",
        "torch fused sgd",
        "torch fused adamw",
        "lars, a loop over tensors",
    ]
    assert all(row["ms"] > 0 for row in found["rows"])
    assert found["bytes"] == found["elements"] * (4 + 4 + 4 * 5)
    half = measure_all("resnet_tiny", torch.device("cpu"), amp_dtype="bf16", repeats=1, warm_up=1)
    assert half["bytes"] == half["elements"] * (2 + 4 + 2 + 4 * 4 + 2)


def test_the_warm_up_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    now = [0.0]
    monkeypatch.setattr("benchmarks.optimizer.time.perf_counter", lambda: now[0])

    def work() -> None:
        calls.append(now[0])
        now[0] += 100.0 if len(calls) <= 2 else 1.0

    times = device_times(work, torch.device("cpu"), repeats=3, warm_up=2)
    assert len(calls) == 5
    assert times.seconds == (1.0, 1.0, 1.0)


def test_input(tmp_path: Path) -> None:
    folder = str(write_shards(tmp_path / "data"))
    report = report_of(
        input_pipelines.main, *IMAGES, folder, "--seconds", "0.05", "--workers", "1,2", "--peers",
        "dataloader,webdataset", "--peer-workers", "1",
    )  # fmt: skip
    names = [row["name"] for row in report["rows"]]
    assert names[:3] == ["ours × 1", "ours × 2", "dataloader × 1"]
    assert all(len(row["rounds"]) == 1 for row in report["rows"])
    assert any(name.endswith("/ dataloader × 1") for name in report["ratios"])
    assert len(names) == 4 or "webdataset" in report["notes"][0]


def test_training_from_images(tmp_path: Path) -> None:
    folder = str(write_shards(tmp_path / "data"))
    words = ("--rounds", "1", "--steps", "1", "--warm-up", "1", "--workers", "1")
    report = report_of(
        input_training.main, *TINY, "--image-size", "28", "-b", "4", "--data-dir", folder, *words,
        "--set", "optim.name=sgd",
    )  # fmt: skip
    training = report["training"]
    rates = training["input_images_per_s"] / training["synthetic_images_per_s"]
    assert training["share"] == pytest.approx(rates)
    assert "sgd" in training["what"]


def test_step_rows_are_measured_in_processes() -> None:
    report = report_of(step.main, *STEP, "--steps", "2", "--warm-up", "1", "--rounds", "1")
    assert [row["name"] for row in report["rows"]] == ["ours", "plain fp32"]
    assert all(row["images_per_s"] > 0 and row["steps"] == 2 for row in report["rows"])
    assert report["ratios"]["ours / plain fp32"] > 0


def test_memory_and_seek() -> None:
    done = call(input_pipelines.main, "--synthetic-index", "3000", "--image-size", "8", "-b", "50")
    assert done.code == 0, done.err
    assert "3,000 samples" in done.out


def test_exchange_on_two_ranks() -> None:
    report = on_two_ranks(
        exchange.main, "--model", "resnet_tiny", "--algorithm", "hierarchical", "--fusion-mib", "0.1",
        "--iterations", "2", "--warm-up", "1",
    )  # fmt: skip
    rows = {row["way"]: row for row in report["rows"]}
    assert {"ddp", "ddp fp16 hook", "hierarchical float32", "hierarchical float16"} <= set(rows)
    assert rows["ddp"]["speed_against_ddp"] == 1
    assert "hierarchical" in rows["hierarchical float16"]["about"]
    assert all(len(row["samples_s"]) == 2 for row in rows.values())
    assert report["bytes"] > 0
    assert report["cluster"]["ranks"] == 2


def test_ddp_on_two_ranks() -> None:
    ways = ("ours", "ours, compute only", "ddp")
    flags = [word for way in ways for word in ("--way", way)]
    report = on_two_ranks(ddp.main, *STEP, "--block", "1", "--iterations", "2", *flags)
    rows = {row["way"]: row for row in report["rows"]}
    assert tuple(rows) == ways
    assert rows["ours"]["exposed_s"] == pytest.approx(
        rows["ours"]["step_s"] - rows["ours, compute only"]["step_s"]
    )
    assert rows["ddp"]["speed_against_ddp"] == 1


@pytest.mark.parametrize(
    ("main", "arguments", "words"),
    [
        (kernels.main, "--set optim.nmae=sgd", "optim.nmae"),
        (kernels.main, "--set model.name=resnet18", "model.name"),
        (kernels.main, "--set run.cuda_graphs=on", "run.cuda_graphs = 'on'"),
        (kernels.main, "--set run.accel.compile=model", "run.accel.compile = 'model'"),
        (kernels.main, "--set run.strategy=unequal", "'run.strategy'"),
        (kernels.main, "--set optim.name=svrg --set optim.momentum=0", "optim.name = 'svrg'"),
        (kernels.main, "--steps 0", "--steps"),
        (optimizer.main, "--device gpu", "--device = 'gpu'"),
        (optimizer.main, "--amp-dtype fp8", "precision.amp_dtype = 'fp8'"),
        (input_pipelines.main, "", "--data-dir"),
        (input_pipelines.main, "--data-dir data --peers dali", "--peers = 'dali'"),
        (input_pipelines.main, "--synthetic-index 9", "--synthetic-index = 9"),
        (step.main, "--row theirs", "--row = 'theirs'"),
        (input_training.main, "--set run.nonsense=1", "unknown setting"),
        (input_training.main, "--set model.name=resnet18", "use --model"),
        (input_training.main, "--set model.num_classes=9", "model.num_classes"),
        (ddp.main, "", "no ranks to measure between"),
        (exchange.main, "--algorithm rign", "comm.algorithm = 'rign'"),
        (exchange.main, "--plan a", "comm.plan = 'a'"),
        (ddp.main, "--block 0", "--block = 0"),
    ],
)
def test_mistakes_are_one_line(
    main: Callable[..., None], arguments: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in filter(is_launchers, list(os.environ)):
        monkeypatch.delenv(name)
    assert words in call(main, *arguments.split()).error_line()
