from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import CheckpointError
from paceline.train.checkpoint import Checkpoint, content_hash, read_file

PATH = Path("step-00000005.pt")


def checkpoint(**changes: Any) -> Checkpoint:
    parts: dict[str, Any] = {
        "progress": {"step": 5, "top1": 12.5, "resumes": [3]},
        "config": {"run": {"seed": 0}},
        "world_size": 2,
        "threads": 1,
        "plan": {"buffer": []},
        "model": {"w": torch.arange(600.0).reshape(2, 3, 10, 10), "b": torch.zeros(0)},
        "batch_norm": {"rows": torch.rand(2, 2, 4), "tracked": torch.tensor(5)},
        "optimizer": {
            "state": {0: {"momentum_buffer": torch.rand(6)}},
            "param_groups": [{"lr": 1}],
        },
        "precision": {"scale": 1024.0, "quiet_steps": 7.0},
        "sampler": {"position": 80},
        "schedule": {"peak_lr": 0.1},
        "rng": {"seed": 0},
        "classes": ["ant", "bee"],
        "versions": {"torch": "2"},
    }
    return Checkpoint(**parts | changes)


def same(a: Checkpoint, b: Checkpoint) -> bool:
    return content_hash(vars(a)) == content_hash(vars(b))


def test_it_comes_back_as_it_was_and_plain_torch_can_read_it(tmp_path: Path) -> None:
    saved = checkpoint()
    saved.write(tmp_path / PATH)
    found = Checkpoint.read(tmp_path / PATH)
    assert same(found, saved)
    assert found.step == 5
    assert torch.equal(found.model["w"], saved.model["w"])
    table = torch.load(tmp_path / PATH, weights_only=True)
    assert (table["format"], table["version"]) == ("paceline-checkpoint", 3)


def test_the_hash_tells_every_part_apart() -> None:
    base = checkpoint()
    channels_last = base.model["w"].to(memory_format=torch.channels_last)
    assert same(base, checkpoint(model={**base.model, "w": channels_last}, batch_norm=base.batch_norm,
                                 optimizer=base.optimizer)), "strides are not content"  # fmt: skip
    others = (
        {"world_size": 3},
        {"precision": {**base.precision, "scale": 512.0}},
        {"progress": {**base.progress, "top1": 12.6}},
        {"model": {**base.model, "w": -base.model["w"]}},
        {"model": {**base.model, "w": base.model["w"].reshape(6, 100)}},
        {"model": {**base.model, "w": base.model["w"].double()}},
        {"model": {"v": base.model["w"], "b": base.model["b"]}},
        {"classes": ["an", "tbee"]},
    )
    parts = {"batch_norm": base.batch_norm, "optimizer": base.optimizer, "model": base.model}
    hashes = {content_hash(vars(checkpoint(**parts | change))) for change in others}
    assert len(hashes | {content_hash(vars(base))}) == len(others) + 1


@pytest.mark.parametrize("first", range(4))
def test_a_flipped_byte_is_noticed_wherever_it_matters(first: int) -> None:
    """It is refused, or it was padding and what comes back is what was saved."""
    saved = checkpoint()
    content = bytes(saved.to_bytes())
    refused: list[str] = []
    for place in range(first, len(content), 4 * 7):
        damaged = bytearray(content)
        damaged[place] ^= 0xFF
        try:
            assert same(Checkpoint.from_bytes(bytes(damaged), PATH), saved), place
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > 50
    # Torch's own words are many lines, in colour, and advise to trust the file.
    assert not any(sign in text for text in refused for sign in ("\n", "\x1b", "weights_only"))


@pytest.mark.parametrize("length", [0, 1, 100, 3000, -1])
def test_a_file_cut_short_is_refused(length: int) -> None:
    with pytest.raises(CheckpointError, match="is broken or not a checkpoint: it is"):
        Checkpoint.from_bytes(bytes(checkpoint().to_bytes())[:length], PATH)


def test_a_later_format_and_a_missing_part_are_refused() -> None:
    table = torch.load(io.BytesIO(checkpoint().to_bytes()), weights_only=True)
    for change, words in (
        ({"version": 4, "rng": {}}, "has format 4; Paceline .* reads 2 and 3; use the Paceline"),
        ({"version": 1, "rng": {}}, "has format 1; Paceline .* reads 2 and 3; use the Paceline"),
        ({"version": 19}, "is damaged"),  # all else matches its SHA-256
        ({"format": "other"}, "is not a Paceline checkpoint"),
        ({"rng": None}, "does not match its SHA-256"),
        ({"sha256": None}, "does not match its SHA-256"),
    ):
        buffer = io.BytesIO()
        torch.save(table | change, buffer)
        with pytest.raises(CheckpointError, match=words):
            Checkpoint.from_bytes(buffer.getvalue(), PATH)
    del table["rng"]
    buffer = io.BytesIO()
    torch.save(table, buffer)
    with pytest.raises(CheckpointError, match="does not match its SHA-256"):
        Checkpoint.from_bytes(buffer.getvalue(), PATH)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        read_file(tmp_path / "nowhere.pt")
    with pytest.raises(CheckpointError, match="cannot read"):
        read_file(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"world_size": None}, {"threads": "1"}, {"plan": []}, {"progress": {}}, {"progress": {"step": -1}},
     {"classes": {}}, {"average": 3}],
)  # fmt: skip
def test_other_types_under_a_right_checksum(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="missing or of another type"):
        Checkpoint.from_bytes(bytes(checkpoint(**changes).to_bytes()), PATH)


def test_a_part_that_is_missing() -> None:
    table = {name: value for name, value in vars(checkpoint()).items() if name != "threads"}
    stream = io.BytesIO()
    head = {"format": "paceline-checkpoint", "version": 3, "sha256": content_hash(table)}
    torch.save({**head, **table}, stream)
    with pytest.raises(CheckpointError, match="threads is missing"):
        Checkpoint.from_bytes(stream.getvalue(), PATH)
