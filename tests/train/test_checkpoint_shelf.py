from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from paceline.core.errors import CheckpointError
from paceline.train.checkpoint import Checkpoint, CheckpointStore, find_checkpoint, set_aside


class Saved:
    """As much of a checkpoint as a shelf needs."""

    def __init__(self, step: int) -> None:
        self.step = step

    def write(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(self.step))


def put(shelf: CheckpointStore, step: int, *, best: bool = False) -> Path:
    return shelf.put(cast(Checkpoint, Saved(step)), best=best)


def test_the_last_k_and_the_best_stay(tmp_path: Path) -> None:
    shelf = CheckpointStore(tmp_path / "c", keep=2)
    for step in (10, 20, 30, 40):
        put(shelf, step, best=step == 20)
    assert shelf.steps() == [30, 40]
    assert shelf.best.read_text() == "20"
    assert shelf.newest() == shelf.path(40)


def test_leftovers_of_a_killed_save_are_removed_and_never_taken_for_checkpoints(
    tmp_path: Path,
) -> None:
    shelf = CheckpointStore(tmp_path, keep=2)
    (tmp_path / ".step-00000050.pt.0123456789abcdef.tmp").write_text("half")
    assert shelf.newest() is None
    put(shelf, 60)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000060.pt"]


def test_later_ones_of_a_run_that_went_back_are_set_aside(tmp_path: Path) -> None:
    shelf = CheckpointStore(tmp_path, keep=2)
    for step in (40, 50):
        put(shelf, step)
    for step in (10, 20, 30):
        assert put(shelf, step).is_file()
    assert shelf.steps() == [20, 30]
    assert shelf.newest() == shelf.path(30)
    assert sorted(p.name for p in tmp_path.glob("*.abandoned")) == [
        "step-00000040.pt.abandoned",
        "step-00000050.pt.abandoned",
    ]


def test_a_salvaged_one_counts_only_where_no_regular_one_is_as_new(tmp_path: Path) -> None:
    shelf = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20):
        put(shelf, step, best=step == 10)
    for step in (15, 20, 25):
        shelf.salvaged_path(step).write_text("alone")
    regular = [shelf.path(20), shelf.path(10), shelf.best]
    assert shelf.candidates(salvaged=False) == regular
    assert shelf.candidates(salvaged=True) == [
        shelf.salvaged_path(25), shelf.path(20), shelf.salvaged_path(20), shelf.salvaged_path(15),
        shelf.path(10), shelf.best,
    ]  # fmt: skip
    assert shelf.newest() == shelf.path(20)
    put(shelf, 22)
    assert [path.name for path in tmp_path.glob("*salvaged*")] == [
        "step-00000025.salvaged.pt.abandoned"
    ]


def test_what_is_set_aside_replaces_nothing(tmp_path: Path) -> None:
    for content in ("first", "second"):
        (tmp_path / "a.pt").write_text(content)
        set_aside(tmp_path / "a.pt", "damaged")
    assert (tmp_path / "a.pt.damaged").read_text() == "first"
    assert (tmp_path / "a.pt.damaged-2").read_text() == "second"


def test_a_run_folder_means_its_best_else_its_newest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        find_checkpoint(tmp_path)
    shelf = CheckpointStore(tmp_path / "checkpoints", keep=2)
    put(shelf, 1)
    assert find_checkpoint(tmp_path) == shelf.path(1)
    put(shelf, 2, best=True)
    assert find_checkpoint(tmp_path) == shelf.best
    assert find_checkpoint(shelf.path(1)) == shelf.path(1)


def test_a_folder_that_turns_read_only_after_the_write_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = CheckpointStore(tmp_path, 1)
    put(shelf, 1)

    def refused(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(CheckpointError, match="cannot be tidied"):
        put(shelf, 2)
    assert shelf.steps() == [1, 2]
