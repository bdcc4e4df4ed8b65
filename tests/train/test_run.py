"""Whole small runs: numeric contract 3, and the files that a run leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data_sets import write_folders
from paceline.core.errors import PacelineError
from paceline.core.events import read_events
from paceline.train.checkpoint import Checkpoint
from paceline.train.weights import checkpoint_weights
from ranks import run_ranks
from small_runs import run_small


def _run(rank: int, output: str, values: dict[str, Any]) -> dict[str, Any]:
    return run_small(output, **values).summary


def test_a_run_leaves_everything_that_was_promised(tmp_path: Path) -> None:
    outcome = run_small(tmp_path / "run", run__tensorboard=True)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    promised = {
        "top1", "top5", "images_per_s", "epochs", "steps", "world_size", "global_batch_size",
        "train_s", "versions", "hardware",
    }  # fmt: skip
    assert promised <= set(summary)
    assert summary["steps"] == 7  # 2 · 56 samples in batches of 16
    assert summary["epochs"] == 2
    assert summary["images"] == 112
    assert summary["stopped_by"] == "finished"
    assert outcome.report == tmp_path / "run/report.html"
    assert "<svg" in outcome.report.read_text()
    events = list(read_events(tmp_path / "run/metrics.jsonl"))
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == list(range(1, 8))
    # Batches of 16 cross the end of epoch 1 (56 samples) in step 4.
    assert [event["step"] for event in events if event["event"] == "eval"] == [4, 7]
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names == ["best.pt", "step-00000004.pt", "step-00000007.pt"]
    assert any((tmp_path / "run/tensorboard").iterdir())


def test_the_exported_weights_are_those_of_the_last_checkpoint(tmp_path: Path) -> None:
    run_small(tmp_path / "run")
    exported = load_file(tmp_path / "run/weights.safetensors")
    saved = checkpoint_weights(Checkpoint.read(tmp_path / "run/checkpoints/step-00000007.pt"))
    assert exported.keys() == saved.keys()
    for name, value in exported.items():
        assert torch.equal(value, saved[name]), name


def test_same_seed_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    first = run_small(tmp_path / "a").summary
    again = run_small(tmp_path / "b", data__workers=0).summary
    other = run_small(tmp_path / "c", run__seed=1).summary
    assert first["weights_sha256"] == again["weights_sha256"]
    assert first["top1"] == again["top1"]
    assert first["weights_sha256"] != other["weights_sha256"]


def test_two_ranks_end_bit_identical_and_repeat_themselves(tmp_path: Path) -> None:
    runs = [run_ranks(2, _run, str(tmp_path / name), {}) for name in ("a", "b")]
    hashes = {summary["weights_sha256"] for run in runs for summary in run}
    assert len(hashes) == 1
    assert runs[0][0]["world_size"] == 2
    assert (tmp_path / "a/metrics.rank1.jsonl").exists()


def test_the_same_micro_batches_on_one_rank_and_two_agree_within_rounding(tmp_path: Path) -> None:
    values = {"run__batch_size": 8}
    run_small(tmp_path / "one", **values)
    run_ranks(2, _run, str(tmp_path / "two"), values)
    one = load_file(tmp_path / "one/weights.safetensors")
    two = load_file(tmp_path / "two/weights.safetensors")
    for name, value in one.items():
        # Running statistics are averaged over ranks, so only the weights must agree.
        if "running" not in name and "tracked" not in name:
            torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("stop", [3, 4, 6])
def test_stopping_at_any_step_and_resuming_is_bit_identical(tmp_path: Path, stop: int) -> None:
    whole = run_small(tmp_path / "whole", checkpoint__interval_steps=1, checkpoint__keep=9)
    saved = tmp_path / f"whole/checkpoints/step-{stop:08d}.pt"
    resumed = run_small(tmp_path / "rest", run__resume=str(saved))
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert resumed.summary["top1"] == whole.summary["top1"]
    assert resumed.summary["images"] == whole.summary["images"]
    assert resumed.summary["resumed_at_steps"] == [stop]


def test_a_batch_larger_than_the_data_set_spans_epochs(tmp_path: Path) -> None:
    summary = run_small(
        tmp_path / "run", run__global_batch_size=100, run__batch_size=10, run__epochs=4
    ).summary
    assert summary["steps"] == 3  # 224 samples: 100, 100, 24
    assert summary["images"] == 224
    assert summary["accumulation"] == 10


def test_the_target_stops_the_run_and_its_time_is_kept(tmp_path: Path) -> None:
    summary = run_small(tmp_path / "run", run__target_top1=1.0, run__epochs=50).summary
    assert summary["stopped_by"] == "target"
    assert summary["steps"] == 4
    assert 0 < summary["time_to_target_s"] <= summary["train_s"]


def test_a_diverged_run_stops_with_a_line(tmp_path: Path) -> None:
    words = "diverged at step 2: the loss was not finite in 2 steps .* the output of layer1.0.conv1"
    with pytest.raises(PacelineError, match=words):
        run_small(
            tmp_path / "run", optim__lr=1e30, optim__warmup_epochs=0.0, run__max_skipped_steps=2
        )


def test_pretrained_weights_are_where_the_run_starts(tmp_path: Path) -> None:
    run_small(tmp_path / "first")
    file = tmp_path / "first/weights.safetensors"
    outcome = run_small(tmp_path / "second", run__pretrained=str(file), optim__lr=1e-12)
    assert outcome.summary["weights_sha256"] is not None
    start, end = load_file(file), load_file(tmp_path / "second/weights.safetensors")
    torch.testing.assert_close(start["fc.weight"], end["fc.weight"], rtol=1e-6, atol=1e-8)


def test_evaluations_follow_their_interval(tmp_path: Path) -> None:
    run_small(tmp_path / "run", run__epochs=5, run__eval_interval_epochs=2)
    events = read_events(tmp_path / "run/metrics.jsonl")
    epochs = [int(event["epoch"]) for event in events if event["event"] == "eval"]
    assert epochs == [2, 4, 5]


def test_what_the_input_counted_is_that_of_all_ranks_and_splits(tmp_path: Path) -> None:
    values = {"data__source": "auto", "data__dir": str(write_folders(tmp_path / "data")),
              "data__cache": "memory"}  # fmt: skip
    counters = run_ranks(2, _run, str(tmp_path / "run"), values)[0]["input_counters"]
    # Two epochs of 40 training images, and two evaluations of 8.
    assert counters["cache_hits"] + counters["cache_misses"] == 2 * 40 + 2 * 8
    assert counters["read_retries"] == 0
