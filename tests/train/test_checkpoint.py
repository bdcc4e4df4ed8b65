"""Files of checkpoints and weights: content, damage, atomic writes, and which ones are kept."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from torch import nn

from paceline.core.errors import CheckpointError
from paceline.train import Checkpoint, CheckpointStore, find_checkpoint, fingerprint, write_weights
from paceline.train.checkpoint import (
    VERSION,
    DamagedCheckpointError,
    ForeignCheckpointError,
    content_hash,
    link_atomically,
    set_aside,
    write_atomically,
)
from train.runs import made_checkpoint

PATH = Path("step-00000005.pt")


def digest(of: Checkpoint) -> str:
    return content_hash(vars(of))


def saved_as(table: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(table, buffer)
    return buffer.getvalue()


def test_round_trip_and_plain_torch_can_read_it(tmp_path: Path) -> None:
    saved = made_checkpoint()
    saved.write(tmp_path / PATH)
    found = Checkpoint.read(tmp_path / PATH)
    assert digest(found) == digest(saved)
    assert (found.step, found.salvaged_by) == (5, None)
    table = torch.load(tmp_path / PATH, weights_only=True)
    assert (table["format"], table["version"]) == ("paceline-checkpoint", VERSION)


def test_the_hash_covers_every_part_but_not_strides() -> None:
    base = made_checkpoint()
    weight = base.model["w"]
    nhwc = weight.to(memory_format=torch.channels_last)
    assert digest(made_checkpoint(model={**base.model, "w": nhwc})) == digest(base)
    others: tuple[dict[str, Any], ...] = (
        {"world_size": 3},
        {"precision": {**base.precision, "scale": 512.0}},
        {"progress": {**base.progress, "top1": 12.6}},
        {"model": {**base.model, "w": -weight}},
        {"model": {**base.model, "w": weight.reshape(6, 100)}},
        {"model": {**base.model, "w": weight.double()}},
        {"model": {"v": weight, "b": base.model["b"]}},
        {"classes": ["an", "tbee"]},
    )
    digests = {digest(made_checkpoint(**change)) for change in others}
    assert len(digests | {digest(base)}) == len(others) + 1


def test_a_flipped_byte_is_refused_or_was_padding() -> None:
    saved = made_checkpoint()
    content, refused = bytes(saved.to_bytes()), []
    for place in range(0, len(content), 9):
        damaged = bytearray(content)
        damaged[place] ^= 0xFF
        try:
            assert digest(Checkpoint.from_bytes(bytes(damaged), PATH)) == digest(saved), place
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > 50
    # torch's own message has many lines, in color, and advises to trust the file.
    assert not any(sign in text for text in refused for sign in ("\n", "\x1b", "weights_only"))


@pytest.mark.parametrize("length", [0, 1, 100, 3000, -1])
def test_a_truncated_file_is_damaged(length: int) -> None:
    with pytest.raises(DamagedCheckpointError):
        Checkpoint.from_bytes(bytes(made_checkpoint().to_bytes())[:length], PATH)


def test_formats_and_missing_parts() -> None:
    table = torch.load(io.BytesIO(made_checkpoint().to_bytes()), weights_only=True)
    later = "use the Paceline version that wrote it"
    for change, kind, remedy in (
        ({"version": VERSION + 1, "rng": {}}, CheckpointError, later),
        ({"version": 1, "rng": {}}, CheckpointError, later),
        ({"version": 19}, DamagedCheckpointError, ""),  # everything else matches its SHA-256
        ({"format": "other"}, ForeignCheckpointError, "--pretrained"),
        ({"rng": None}, DamagedCheckpointError, ""),
        ({"sha256": None}, DamagedCheckpointError, ""),
    ):
        with pytest.raises(kind) as caught:
            Checkpoint.from_bytes(saved_as(table | change), PATH)
        assert type(caught.value) is kind
        assert remedy in caught.value.remedy
    # Format 3 had no exchange, format 4 no strategy.
    for version, part in ((3, "exchange"), (4, "strategy")):
        old = {name: value for name, value in vars(made_checkpoint()).items() if name != part}
        head = {"format": "paceline-checkpoint", "version": version, "sha256": content_hash(old)}
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.from_bytes(saved_as(head | old), PATH)
        assert (type(caught.value), caught.value.remedy) == (CheckpointError, later)
    del table["rng"]
    with pytest.raises(DamagedCheckpointError):
        Checkpoint.from_bytes(saved_as(table), PATH)


@pytest.mark.parametrize(
    "changes",
    [{"world_size": None}, {"threads": "1"}, {"plan": []}, {"progress": {}}, {"progress": {"step": -1}},
     {"classes": {}}, {"average": 3}],
)  # fmt: skip
def test_other_types_with_a_correct_hash_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="missing or has the wrong type"):
        Checkpoint.from_bytes(bytes(made_checkpoint(**changes).to_bytes()), PATH)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.pt", tmp_path):
        with pytest.raises(CheckpointError, match="check the path"):
            Checkpoint.read(path)


# --- CheckpointStore ---------------------------------------------------------------------------


class Saved:
    """The part of a checkpoint that a store uses."""

    def __init__(self, step: int) -> None:
        self.step = step

    def write(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(self.step))


def put(store: CheckpointStore, step: int, *, best: bool = False) -> Path:
    return store.put(cast(Checkpoint, Saved(step)), best=best)


def test_the_last_k_and_the_best_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    (tmp_path / ".step-00000050.pt.0123456789abcdef.tmp").write_text("of a killed process")
    assert store.newest() is None
    for step in (10, 20, 30, 40):
        put(store, step, best=step == 20)
    assert store.steps() == [30, 40]
    assert store.best.read_text() == "20"
    assert store.newest() == store.path(40)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best.pt", "step-00000030.pt", "step-00000040.pt",
    ]  # fmt: skip


def test_later_checkpoints_of_a_run_that_went_back_are_set_aside(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (40, 50, 10, 20, 30):
        put(store, step)
    assert store.steps() == [20, 30]
    assert sorted(path.name for path in tmp_path.glob("*.abandoned")) == [
        "step-00000040.pt.abandoned",
        "step-00000050.pt.abandoned",
    ]


def test_a_salvaged_checkpoint_counts_only_if_no_regular_one_is_as_new(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20):
        put(store, step, best=step == 10)
    for step in (15, 20, 25):
        store.salvaged_path(step).write_text("alone")
    assert store.candidates() == [
        store.salvaged_path(25), store.path(20), store.salvaged_path(20), store.salvaged_path(15),
        store.path(10), store.best,
    ]  # fmt: skip
    assert store.newest() == store.path(20)
    put(store, 22)
    assert [p.name for p in tmp_path.glob("*salvaged*")] == ["step-00000025.salvaged.pt.abandoned"]


def test_set_aside_replaces_nothing(tmp_path: Path) -> None:
    for content in ("first", "second"):
        (tmp_path / "a.pt").write_text(content)
        set_aside(tmp_path / "a.pt", "damaged")
    assert (tmp_path / "a.pt.damaged").read_text() == "first"
    assert (tmp_path / "a.pt.damaged-2").read_text() == "second"


def test_a_run_folder_means_its_best_else_its_newest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        find_checkpoint(tmp_path)
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    put(store, 1)
    assert find_checkpoint(tmp_path) == store.path(1)
    put(store, 2, best=True)
    assert find_checkpoint(tmp_path) == store.best
    assert find_checkpoint(store.path(1)) == store.path(1)


def test_a_folder_that_turns_read_only_after_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, 1)
    put(store, 1)

    def refused(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(CheckpointError, match="Permission denied"):
        put(store, 2)
    assert store.steps() == [1, 2]


# --- files -------------------------------------------------------------------------------------


def raise_error(number: int) -> Any:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


def test_a_second_name_is_a_link_or_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, second = tmp_path / "a", tmp_path / "b"
    source.write_bytes(b"data")
    link_atomically(source, second)
    assert second.samefile(source)
    monkeypatch.setattr(os, "link", raise_error(errno.EPERM))
    link_atomically(source, second)
    assert second.read_bytes() == b"data"
    assert not second.samefile(source)
    with pytest.raises(CheckpointError, match="cannot write"):
        write_atomically(source / "under", b"x")


def test_weights_files_and_fingerprints(tmp_path: Path) -> None:
    net = nn.Conv2d(3, 4, 3)
    before = fingerprint(net)
    net = net.to(memory_format=torch.channels_last)
    assert fingerprint(net) == before, "the memory format does not matter"
    write_weights(net.state_dict(), tmp_path / "w.safetensors", {"model": "conv"})
    with safe_open(tmp_path / "w.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
        assert file.metadata()["model"] == "conv"
        assert torch.equal(file.get_tensor("weight"), net.weight)
    with torch.no_grad():
        net.weight.view(torch.int32)[0, 0, 0, 0] ^= 1
    assert fingerprint(net) != before
