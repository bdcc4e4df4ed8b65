"""Data that is missing, broken, wrongly labelled or partly corrupt: named, and never a hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import faults
from cli_runs import Call, events, run, run_two, small_on, summary
from data_sets import png, write_folders, write_shards
from paceline.data import SampleOrder
from paceline.train.checkpoint import Checkpoint

KILL = partial(faults.signal_self, signal.SIGKILL)
SAVES = ("--set", "checkpoint.interval_steps=3")


def _add_class(folder: Path, split: str, name: str, images: int) -> None:
    (folder / split / name).mkdir()
    for number in range(images):
        (folder / split / name / f"{number}.png").write_bytes(png(number))


def _no_classes_file(folder: Path) -> None:
    write_shards(folder, labels=lambda i: 7 if i == 1003 else i % 4)
    (folder / "classes.json").unlink()


SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda folder: None, "data: "),
    "truncated": (
        lambda folder: os.truncate(write_shards(folder) / "train-1.tar", 12_000),
        "data/train-1.tar: ",
    ),
    "label": (
        lambda folder: write_shards(folder, labels=lambda i: 4 if i == 23 else i % 4),
        "train-1.tar:0023.png: label 4",
    ),
    "validation label": (_no_classes_file, "val-0.tar:1003.png: label 7"),
    "class": (
        lambda folder: _add_class(write_folders(folder), "val", "zebra", images=1),
        "data/val/zebra: ",
    ),
    "no image": (
        lambda folder: [p.unlink() for p in (write_folders(folder) / "train").glob("*/*.png")],
        "data/train: ",
    ),
}


@pytest.mark.parametrize(("spoil", "cause"), SPOILT.values(), ids=SPOILT)
def test_bad_data(call: Call, tmp_path: Path, spoil: Callable[[Path], Any], cause: str) -> None:
    spoil(tmp_path / "data")
    done = call(*small_on("data"))
    assert cause in done.error_line()
    assert "; " in done.error_line(), "a remedy"
    assert done.code == 1
    assert not (tmp_path / "runs").exists(), "a run that cannot start leaves nothing"


def test_fewer_classes_than_the_data_has(call: Call, tmp_path: Path) -> None:
    write_shards(tmp_path / "data")
    for more in ([], ["--dry-run"]):
        line = call(*small_on("data", "--set", "model.num_classes=3", *more)).error_line()
        assert "model.num_classes = 3" in line


def test_data_that_is_missing_on_one_rank_only(tmp_path: Path) -> None:
    write_shards(tmp_path / "here")
    done = run_two(small_on("here"), tmp_path, second=small_on("there"))
    for rank in done:
        assert rank.error_line().startswith("rank 1: there: ")
        assert rank.code == 1


def test_a_slow_rank_gets_the_error_too(tmp_path: Path) -> None:
    """Rank 0 hosts the store of the ranks' agreement, and must not end too soon."""
    done = run_two(small_on("nowhere"), tmp_path, [None, partial(faults.slow_to_hear, "data", 1.0)])
    assert all(rank.error_line().startswith("rank 0: nowhere: ") for rank in done)


def test_data_that_differs_between_ranks(tmp_path: Path) -> None:
    write_shards(tmp_path / "here")
    write_shards(tmp_path / "there", train=44)
    for rank in run_two(small_on("here"), tmp_path, second=small_on("there")):
        assert "40 on rank 0, 44 on rank 1" in rank.error_line()


def test_a_shard_that_is_cut_on_one_rank_while_it_trains(tmp_path: Path) -> None:
    for name in ("here", "there"):
        write_shards(tmp_path / name)
    spoil = partial(faults.cut_short, tmp_path / "there/train-1.tar")
    # Batches that were read ahead are trained first, so that later checkpoints may follow.
    quick = ("--workers", "1", "--output", "run", *SAVES, "--set", "checkpoint.keep=9")
    done = run_two(
        small_on("here", *quick),
        tmp_path,
        [None, partial(faults.at_micro_batch, 3, 1, spoil)],
        second=small_on("there", *quick),
    )
    lines = [rank.error_line() for rank in done]
    assert lines[0] == lines[1]
    assert lines[0].startswith("rank 1: there/train-1")
    assert Checkpoint.read(tmp_path / "run/checkpoints/step-00000003.pt").step == 3


Whole = tuple[Path, dict[str, Any]]
TWO_ALLOWED = ("--set", "data.max_corrupt_share=0.05")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A data set with two corrupt training images and one of validation, and the run on it."""
    folder = tmp_path_factory.mktemp("corrupt")
    write_shards(folder / "data", corrupt={17, 30, 1005})
    done = run(small_on("data", "--output", "run", "--workers", "0", *TWO_ALLOWED), folder)
    assert done.code == 0, done.err
    for name in ("train-0.tar:0017.png", "train-1.tar:0030.png"):
        assert done.out.count(name) == 1
    return folder, summary(folder / "run")


def test_a_corrupt_image_is_named_counted_and_skipped(whole: Whole) -> None:
    folder, ended = whole
    named = {(event["name"], bool(event["reason"])) for event in events(folder / "run", "corrupt")}
    assert named == {
        ("train-0.tar:0017.png", True),
        ("train-1.tar:0030.png", True),
        ("val-0.tar:1005.png", True),
    }
    assert (ended["corrupt_samples"], ended["corrupt_val_samples"]) == (2, 1)
    assert ended["images"] == 80, "others take their places"
    assert events(folder / "run", "eval")[-1]["samples"] == 7


def test_it_is_skipped_and_counted_alike_across_a_resume(whole: Whole, tmp_path: Path) -> None:
    folder, ended = whole
    arguments = small_on(folder / "data", "--output", "run", *TWO_ALLOWED)
    # Killed in the second epoch, before they come up again: the new process meets them anew.
    assert run(arguments, tmp_path, partial(faults.at_micro_batch, 5, 0, KILL)).code < 0
    assert run([*arguments, "--resume", "auto"], tmp_path).code == 0
    resumed = summary(tmp_path / "run")
    for name in ("weights_sha256", "top1", "corrupt_samples", "corrupt_val_samples"):
        assert resumed[name] == ended[name], name


@pytest.mark.parametrize(
    ("corrupt", "share", "words"),
    [
        ({3, 30}, "0.01", "2 corrupt of 40 samples"),
        ({3}, "0", "train-0.tar:0003.png"),
        (set(range(40)), "0.5", "corrupt of 40 samples"),
        ({1001, 1002}, "0.01", "val-0.tar:1001"),
    ],
)
def test_more_than_the_share_stops_the_run(
    call: Call, tmp_path: Path, corrupt: set[int], share: str, words: str
) -> None:
    write_shards(tmp_path / "data", corrupt=corrupt)
    line = call(*small_on("data", "--set", f"data.max_corrupt_share={share}")).error_line()
    assert words in line
    assert "data.max_corrupt_share" in line


def test_the_share_is_that_of_all_ranks_together(tmp_path: Path) -> None:
    # In the first step rank 0 has the first four of the order, rank 1 the next: each meets one.
    order = SampleOrder(40, seed=0).permutation(0).tolist()
    write_shards(tmp_path / "data", corrupt={order[0], order[4]})
    for rank in run_two(small_on("data"), tmp_path):
        assert "2 corrupt of 40 samples by step 1" in rank.error_line()
