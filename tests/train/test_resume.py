"""Resuming in the less common ways: elsewhere, longer, with other settings, after going back."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.config import load_config
from paceline.core.errors import CheckpointError, PacelineError
from paceline.core.events import Event, StartEvent, StepEvent
from paceline.data.packing.pack import pack
from paceline.data.packing.pack_options import PackOptions
from paceline.data.sources.synthetic import SyntheticImages
from paceline.train.checkpoint import Checkpoint
from paceline.train.run import RunOutcome, run_training
from paceline.train.run_folder import LOCAL_SETTINGS
from paceline.train.run_state import changes, check_pinned
from ranks import run_ranks
from small_runs import Silent, run_small, small_config

EVERY_STEP: dict[str, Any] = {"checkpoint__interval_steps": 1, "checkpoint__keep": 99}


class StopAt(Silent):
    """Sends SIGTERM to this process once a step is done."""

    step = 0

    def on_event(self, event: Event) -> None:
        super().on_event(event)
        if isinstance(event, StepEvent) and event.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def stop_after(step: int, output: Path, **values: Any) -> RunOutcome:
    display = StopAt()
    display.step = step
    return run_training(small_config(output, **values), lambda: display)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_checkpoint_resumed_elsewhere_is_saved_there_at_once(tmp_path: Path) -> None:
    whole = run_small(tmp_path / "a", **EVERY_STEP)
    saved = str(tmp_path / "a/checkpoints/step-00000003.pt")
    stopped = stop_after(4, tmp_path / "b", run__resume=saved)
    assert stopped.result.stopped_by == "SIGTERM"
    assert "step-00000003.pt" in names(tmp_path / "b")
    assert "step-00000004.pt" in names(tmp_path / "b")
    rest = run_small(tmp_path / "b", run__resume="auto")
    assert rest.summary["resumed_at_steps"] == [3, 4]
    assert rest.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_going_back_does_not_come_back_to_what_was_left(tmp_path: Path) -> None:
    run_small(tmp_path / "a", **EVERY_STEP)
    saved = str(tmp_path / "a/checkpoints/step-00000003.pt")
    stop_after(4, tmp_path / "a", run__resume=saved, optim__lr=0.01, **EVERY_STEP)
    rest = run_small(tmp_path / "a", run__resume="auto", optim__lr=0.01, **EVERY_STEP)
    assert rest.summary["resumed_at_steps"] == [3, 4]
    straight = run_small(tmp_path / "b", run__resume=saved, optim__lr=0.01)
    assert rest.summary["weights_sha256"] == straight.summary["weights_sha256"]


def test_settings_that_came_later_are_no_change(tmp_path: Path) -> None:
    stop_after(2, tmp_path / "a")
    [saved] = (tmp_path / "a/checkpoints").glob("step-*.pt")
    checkpoint = Checkpoint.read(saved)
    del checkpoint.config["run"]["mixup"]
    config = small_config(tmp_path / "a", optim__lr=0.02)
    assert changes(checkpoint, config, LOCAL_SETTINGS) == "optim.lr 0.05 → 0.02"


def test_settings_that_change_are_recorded(tmp_path: Path) -> None:
    stop_after(2, tmp_path / "a")
    display = Silent()
    config = small_config(tmp_path / "a", run__resume="auto", optim__lr=0.02, data__workers=0)
    run_training(config, lambda: display)
    start = display.events[0]
    assert isinstance(start, StartEvent)
    assert start.chosen["changed on resume"] == "optim.lr 0.05 → 0.02"
    assert start.versions["torch"]
    assert start.hardware["device"] == "cpu"


def test_a_longer_run_goes_on_only_from_a_full_batch(tmp_path: Path) -> None:
    run_small(tmp_path / "a", run__epochs=1, **EVERY_STEP)  # 56 samples: 16, 16, 16 and 8
    with pytest.raises(PacelineError, match="whose last batch was not full; raise --epochs from"):
        run_small(tmp_path / "a", run__epochs=2, run__resume="auto")
    saved = str(tmp_path / "a/checkpoints/step-00000003.pt")
    longer = run_small(tmp_path / "b", run__epochs=2, run__resume=saved)
    assert longer.summary["images"] == 112


def test_a_finished_run_that_goes_on_is_not_finished(tmp_path: Path) -> None:
    run_small(tmp_path / "a", run__epochs=2)  # 112 samples are seven full batches
    assert (tmp_path / "a/summary.json").exists()
    stop_after(8, tmp_path / "a", run__epochs=4, run__resume="auto")
    assert not (tmp_path / "a/summary.json").exists()
    done = run_small(tmp_path / "a", run__epochs=4, run__resume="auto")
    assert done.summary["images"] == 224


def test_the_time_to_a_target_is_that_target_s(tmp_path: Path) -> None:
    reached = run_small(tmp_path / "a", run__target_top1=1.0)
    assert reached.summary["time_to_target_s"] > 0
    missed = run_small(tmp_path / "a", run__target_top1=100.0, run__resume="auto")
    if missed.summary["top1"] < 100:
        assert missed.summary["time_to_target_s"] is None
        assert missed.summary["stopped_by"] == "finished"
    if missed.summary["steps"] == 7:
        # A target set afterwards has no time: the run did not stop there.
        with pytest.raises(PacelineError, match="run.target_top1 100.0 → 0.5"):
            run_small(tmp_path / "a", run__target_top1=0.5, run__resume="auto")


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file with its bytes and the time of its last change."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("target", [None, 1.0])
def test_a_finished_run_is_left_as_it_is(tmp_path: Path, target: float | None) -> None:
    first = run_small(tmp_path / "a", run__target_top1=target)
    before = content(tmp_path / "a")
    own: dict[str, Any] = {"run__target_top1": target, "run__resume": "auto"}
    again = run_small(tmp_path / "a", **own, data__workers=0, checkpoint__interval_steps=3)
    assert again.already_finished
    assert not first.already_finished
    assert again.summary == first.summary
    assert again.result.stopped_by == ("target" if target else "finished")
    for changed in ({"optim__lr": 0.3}, {"run__smoothing": 0.0, "optim__momentum": 0.5}):
        with pytest.raises(CheckpointError) as caught:
            run_small(tmp_path / "a", **own, **changed)
        for name in changed:
            assert name.replace("__", ".") in str(caught.value)
    assert content(tmp_path / "a") == before


def test_the_end_of_a_run_takes_no_other_settings_elsewhere(tmp_path: Path) -> None:
    run_small(tmp_path / "a")
    end = str(tmp_path / "a/checkpoints/step-00000007.pt")
    with pytest.raises(CheckpointError, match=re.escape("optim.lr 0.05 → 0.3")):
        run_small(tmp_path / "b", run__resume=end, optim__lr=0.3)
    assert not (tmp_path / "b").exists()
    copied = run_small(tmp_path / "b", run__resume=end)
    assert not copied.already_finished
    assert (tmp_path / "b/summary.json").exists()


def test_a_run_that_was_killed_before_its_summary_still_gets_one(tmp_path: Path) -> None:
    first = run_small(tmp_path / "a")
    (tmp_path / "a/summary.json").unlink()
    with pytest.raises(CheckpointError, match=re.escape("optim.lr")):
        run_small(tmp_path / "a", run__resume="auto", optim__lr=0.3)
    again = run_small(tmp_path / "a", run__resume="auto")
    assert not again.already_finished
    written = json.loads((tmp_path / "a/summary.json").read_text())
    assert written["weights_sha256"] == first.summary["weights_sha256"]


def _resume_on_rank(rank: int, output: str, lr: float) -> tuple[bool, str]:
    try:
        outcome = run_small(output, run__resume="auto", optim__lr=lr)
    except PacelineError as error:
        return False, str(error)
    return outcome.already_finished, outcome.result.stopped_by


def test_all_ranks_agree_that_a_run_is_finished(tmp_path: Path) -> None:
    run_small(tmp_path / "a")
    before = content(tmp_path / "a")
    assert run_ranks(2, _resume_on_rank, str(tmp_path / "a"), 0.05) == [(True, "finished")] * 2
    for finished, error in run_ranks(2, _resume_on_rank, str(tmp_path / "a"), 0.3):
        assert not finished
        assert "optim.lr 0.05 → 0.3" in error
    assert content(tmp_path / "a") == before


def test_the_saved_configuration_repeats_the_run(tmp_path: Path) -> None:
    first = run_small(tmp_path / "a", run__batch_size=8, run__global_batch_size=None)
    config = load_config(str(tmp_path / "a/config.toml"), {"run.output": str(tmp_path / "b")})
    again = run_training(config, Silent)
    assert config.run.resume == ""
    assert config.run.global_batch_size == 8
    assert again.summary["weights_sha256"] == first.summary["weights_sha256"]


def test_a_start_that_fails_leaves_no_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PacelineError, match="nowhere"):
        run_small("", run__pretrained="nowhere.pth")
    assert list(tmp_path.glob("runs/*")) == []
    (tmp_path / "foreign.pt").write_bytes(b"no checkpoint")
    with pytest.raises(PacelineError, match="foreign.pt"):
        run_small("", run__resume="foreign.pt")
    with pytest.raises(PacelineError, match="foreign.pt"):
        run_small("new", run__resume="foreign.pt")
    assert list(tmp_path.glob("runs/*")) == []
    assert not (tmp_path / "new").exists()


def test_threads_are_the_checkpoint_s_unless_they_are_given(tmp_path: Path) -> None:
    stop_after(2, tmp_path / "a", run__threads=1)
    kept = json.loads((tmp_path / "a/metrics.jsonl").read_text().splitlines()[0])
    assert kept["chosen"]["threads"] == "1"
    display = Silent()
    run_training(small_config(tmp_path / "a", run__resume="auto", run__threads=0), lambda: display)
    assert isinstance(display.events[0], StartEvent)
    assert display.events[0].chosen["threads"] == "1 (as in the checkpoint)"


def test_the_order_of_samples_is_pinned(tmp_path: Path) -> None:
    """Also by what it depends on besides the settings: the sizes of the shards."""
    source = SyntheticImages(56, 4, 28, 1, 0)
    for name, size in (("a", 14), ("b", 8)):
        options = PackOptions(shard_samples=size, shuffle=False)
        pack({"train": source, "val": source}, tmp_path / name, options)
    by_shards: dict[str, Any] = {"data__source": "auto", "data__shuffle": "shards"}
    first, other = ({"data__dir": str(tmp_path / name)} for name in "ab")
    stop_after(2, tmp_path / "run", **by_shards, **first)
    again: dict[str, Any] = {"run__resume": "auto"} | by_shards
    for values, line in (
        (first | {"data__shuffle": "global"}, "has data.shuffle = 'shards', this run 'global'"),
        (first | {"data__shuffle_run": 5}, "has data.shuffle_run = 16, this run 5"),
        (first | {"data__shuffle_window_shards": 2}, "has data.shuffle_window_shards = 16"),
        (other, r"has digest of the labels = '(\w+), shards \w+', this run '\1, shards"),
    ):
        with pytest.raises(PacelineError, match=line):
            run_small(tmp_path / "run", **(again | values))
    assert run_small(tmp_path / "run", **again, **first).summary["resumed_at_steps"] == [2]


def test_a_checkpoint_from_before_there_was_a_choice_of_order(tmp_path: Path) -> None:
    now = small_config(tmp_path)
    tables = now.to_tables()
    for name in ("shuffle", "shuffle_run", "shuffle_window_shards"):
        tables["data"].pop(name, None)
    before = cast("Checkpoint", SimpleNamespace(config=tables))
    check_pinned(before, now, tmp_path)
    with pytest.raises(PacelineError, match="has data.shuffle = 'global', this run 'shards'"):
        check_pinned(before, small_config(tmp_path, data__shuffle="shards"), tmp_path)
