"""Resuming in the less common ways: elsewhere, longer, with other settings, after going back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli_runs import summary
from paceline.config import load_config
from paceline.core.errors import CheckpointError, PacelineError
from paceline.data import PackOptions, SyntheticImages, pack_splits
from paceline.train import Checkpoint, run_training
from paceline.train.run_folder import LOCAL_SETTINGS
from paceline.train.run_state import PinnedPlan, changes
from ranks import run_ranks
from small_runs import Silent, run_small, small_config
from train.runs import EVERY_STEP, stop_after, watched


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file with its bytes and modification time."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("stop", [3, 4, 6])
def test_resuming_at_any_step_is_bit_identical(finished: Path, tmp_path: Path, stop: int) -> None:
    saved = finished / f"checkpoints/step-{stop:08d}.pt"
    resumed = run_small(tmp_path / "rest", run__resume=str(saved)).summary
    whole = summary(finished)
    for name in ("weights_sha256", "top1", "images"):
        assert resumed[name] == whole[name]
    assert resumed["resumed_at_steps"] == [stop]


def test_resuming_with_other_settings_names_the_command_that_works(copied: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        run_small(copied, run__resume="auto", optim__name="lars", optim__lr=1.0)
    command = f"paceline train {copied / 'config.toml'} --output {copied} --resume auto"
    assert command in caught.value.remedy
    values = {"run.output": str(copied), "run.resume": "auto"}
    outcome = run_training(load_config(str(copied / "config.toml"), values), Silent)
    assert outcome.already_finished


def test_settings_of_another_optimizer_do_not_keep_a_run_from_resuming(tmp_path: Path) -> None:
    """`config.toml` leaves them out."""
    unused: dict[str, Any] = {"optim__lars__clip": True, "run__unequal__shares": "3:1"}
    stop_after(2, tmp_path / "a", **unused, **EVERY_STEP)
    values = {"run.output": str(tmp_path / "a"), "run.resume": "auto"}
    config = load_config(str(tmp_path / "a/config.toml"), values)
    checkpoint = Checkpoint.read(tmp_path / "a/checkpoints/step-00000002.pt")
    for resumed in (config, small_config(tmp_path / "a", **unused, **EVERY_STEP)):
        assert changes(checkpoint, resumed, LOCAL_SETTINGS.__contains__) == ""
        assert PinnedPlan.of(checkpoint, resumed, 1).whole
    assert not run_training(config, Silent).already_finished
    assert run_training(config, Silent).already_finished


def test_progress_and_settings_of_another_version_are_refused(copied: Path) -> None:
    saved = copied / "checkpoints/step-00000003.pt"
    checkpoint = Checkpoint.read(saved)
    checkpoint.progress["later"] = 1.0
    checkpoint.write(saved)
    with pytest.raises(CheckpointError, match="later"):
        run_small(copied, run__resume=str(saved))
    del checkpoint.progress["later"]
    checkpoint.config["run"]["strategy"] = 5
    checkpoint.write(saved)
    assert "run.strategy 5" in changes(
        checkpoint, small_config(copied), LOCAL_SETTINGS.__contains__
    )
    assert run_small(copied, run__resume=str(saved)).summary["resumed_at_steps"] == [3]


def test_a_checkpoint_resumed_elsewhere_is_saved_there_at_once(
    finished: Path, tmp_path: Path
) -> None:
    saved = str(finished / "checkpoints/step-00000003.pt")
    assert stop_after(4, tmp_path / "b", run__resume=saved).result.stopped_by == "SIGTERM"
    names = {path.name for path in (tmp_path / "b/checkpoints").iterdir()}
    assert {"step-00000003.pt", "step-00000004.pt"} <= names
    rest = run_small(tmp_path / "b", run__resume="auto").summary
    assert rest["resumed_at_steps"] == [3, 4]
    assert rest["weights_sha256"] == summary(finished)["weights_sha256"]


def test_going_back_abandons_later_checkpoints(copied: Path, tmp_path: Path) -> None:
    saved = str(copied / "checkpoints/step-00000003.pt")
    straight = run_small(tmp_path / "b", run__resume=saved, optim__lr=0.01).summary
    stop_after(4, copied, run__resume=saved, optim__lr=0.01, **EVERY_STEP)
    rest = run_small(copied, run__resume="auto", optim__lr=0.01, **EVERY_STEP).summary
    assert rest["resumed_at_steps"] == [3, 4]
    assert rest["weights_sha256"] == straight["weights_sha256"]


def test_changed_settings_and_threads_are_recorded(tmp_path: Path) -> None:
    stop_after(2, tmp_path / "a", run__threads=1)
    [saved] = (tmp_path / "a/checkpoints").glob("step-*.pt")
    checkpoint = Checkpoint.read(saved)
    del checkpoint.config["run"]["mixup"]  # as if the setting were newer
    changed: dict[str, Any] = {"optim__lr": 0.02, "data__workers": 0, "run__threads": 0}
    config = small_config(tmp_path / "a", **changed)
    assert changes(checkpoint, config, LOCAL_SETTINGS.__contains__) == "optim.lr 0.05 → 0.02"
    _, events = watched(tmp_path / "a", run__resume="auto", **changed)
    start = events[0]
    assert start.chosen["changed on resume"] == "optim.lr 0.05 → 0.02"
    assert start.chosen["threads"].startswith("1 ("), "the checkpoint's, unless they are given"
    assert start.versions["torch"]
    assert start.hardware["device"] == "cpu"


def test_a_longer_run_resumes_only_from_a_full_batch(tmp_path: Path) -> None:
    run_small(tmp_path / "a", run__epochs=1, **EVERY_STEP)  # 56 samples: 16, 16, 16 and 8
    with pytest.raises(CheckpointError, match="last batch was not full"):
        run_small(tmp_path / "a", run__epochs=2, run__resume="auto")
    saved = str(tmp_path / "a/checkpoints/step-00000003.pt")
    assert run_small(tmp_path / "b", run__epochs=2, run__resume=saved).summary["images"] == 112


def test_a_finished_run_that_is_continued_is_not_finished(copied: Path) -> None:
    stop_after(8, copied, run__epochs=4, run__resume="auto")  # 112 samples are seven full batches
    assert not (copied / "summary.json").exists()
    assert run_small(copied, run__epochs=4, run__resume="auto").summary["images"] == 224


def test_the_time_to_a_target_belongs_to_that_target(tmp_path: Path) -> None:
    assert run_small(tmp_path / "a", run__target_top1=1.0).summary["time_to_target_s"] > 0
    missed = run_small(tmp_path / "a", run__target_top1=100.0, run__resume="auto").summary
    if missed["top1"] < 100:
        assert (missed["time_to_target_s"], missed["stopped_by"]) == (None, "finished")
    if missed["steps"] == 7:
        # A target set afterwards has no time: the run did not stop there.
        with pytest.raises(CheckpointError, match="run.target_top1 100.0 → 0.5"):
            run_small(tmp_path / "a", run__target_top1=0.5, run__resume="auto")


@pytest.mark.parametrize("target", [None, 1.0])
def test_a_finished_run_is_left_unchanged(tmp_path: Path, target: float | None) -> None:
    first = run_small(tmp_path / "a", run__target_top1=target)
    before = content(tmp_path / "a")
    own: dict[str, Any] = {"run__target_top1": target, "run__resume": "auto"}
    again = run_small(
        tmp_path / "a", **own, data__workers=0, checkpoint__interval_steps=3,
        run__accel__fused_convolutions="auto",
    )  # fmt: skip
    assert (first.already_finished, again.already_finished) == (False, True)
    assert again.summary == first.summary
    assert again.result.stopped_by == ("target" if target else "finished")
    changed = {"run__smoothing": 0.0, "optim__momentum": 0.5}
    with pytest.raises(CheckpointError, match=r"optim\.momentum.*run\.smoothing"):
        run_small(tmp_path / "a", **own, **changed)
    assert content(tmp_path / "a") == before


def test_the_end_of_a_run_accepts_no_other_settings(copied: Path, tmp_path: Path) -> None:
    end = str(copied / "checkpoints/step-00000007.pt")
    with pytest.raises(CheckpointError, match=r"optim\.lr 0\.05 → 0\.3"):
        run_small(tmp_path / "b", run__resume=end, optim__lr=0.3)
    assert not (tmp_path / "b").exists()
    assert not run_small(tmp_path / "b", run__resume=end).already_finished
    before = summary(copied)
    (copied / "summary.json").unlink()  # killed before its summary was written
    with pytest.raises(CheckpointError, match=r"optim\.lr"):
        run_small(copied, run__resume="auto", optim__lr=0.3)
    assert not run_small(copied, run__resume="auto").already_finished
    assert summary(copied)["weights_sha256"] == before["weights_sha256"]


def _resume_on_rank(rank: int, output: str, lr: float) -> tuple[bool, str]:
    try:
        outcome = run_small(output, run__resume="auto", optim__lr=lr)
    except PacelineError as error:
        return False, str(error)
    return outcome.already_finished, outcome.result.stopped_by


def test_all_ranks_agree_that_a_run_is_finished(copied: Path) -> None:
    before = content(copied)
    assert run_ranks(2, _resume_on_rank, str(copied), 0.05) == [(True, "finished")] * 2
    for done, error in run_ranks(2, _resume_on_rank, str(copied), 0.3):
        assert not done
        assert "optim.lr 0.05 → 0.3" in error
    assert content(copied) == before


def test_the_saved_configuration_repeats_the_run(tmp_path: Path) -> None:
    first = run_small(tmp_path / "a", run__batch_size=8, run__global_batch_size=None)
    config = load_config(str(tmp_path / "a/config.toml"), {"run.output": str(tmp_path / "b")})
    assert (config.run.resume, config.run.global_batch_size) == ("", 8)
    again = run_training(config, Silent)
    assert again.summary["weights_sha256"] == first.summary["weights_sha256"]


def test_a_start_that_fails_leaves_no_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign.pt").write_bytes(b"no checkpoint")
    for output, values in (
        ("", {"run__pretrained": "nowhere.pth"}),
        ("", {"run__resume": "foreign.pt"}),
        ("new", {"run__resume": "foreign.pt"}),
    ):
        with pytest.raises(CheckpointError, match="nowhere|foreign"):
            run_small(output, **values)
    assert list(tmp_path.glob("runs/*")) == []
    assert not (tmp_path / "new").exists()


def test_the_order_of_samples_is_pinned(tmp_path: Path) -> None:
    """Including the sizes of the shards, on which it depends."""
    source = SyntheticImages(56, 4, 12, 1, 0)
    for name, size in (("a", 14), ("b", 8)):
        options = PackOptions(shard_samples=size, shuffle=False)
        pack_splits({"train": source, "val": source}, tmp_path / name, options)
    by_shards: dict[str, Any] = {"data__source": "auto", "data__shuffle": "shards"}
    first, other = ({"data__dir": str(tmp_path / name)} for name in "ab")
    stop_after(2, tmp_path / "run", **by_shards, **first)
    again: dict[str, Any] = {"run__resume": "auto"} | by_shards
    for values, name in (
        (first | {"data__shuffle": "global"}, r"data\.shuffle"),
        (other, r"digest of the labels = '(\w+), shards \w+', but this run has '\1, shards"),
    ):
        with pytest.raises(CheckpointError, match=f"has {name}"):
            run_small(tmp_path / "run", **(again | values))
    assert run_small(tmp_path / "run", **again, **first).summary["resumed_at_steps"] == [2]
