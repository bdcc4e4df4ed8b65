"""Somebody's photos, in one command."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from cli_runs import Call, summary


def photo(number: int, kind: str, mode: str = "RGB") -> bytes:
    chance = np.random.default_rng(number)
    side = 40 + 7 * (number % 5)
    level = 60 * (number % 3) + 40
    noise = chance.integers(0, 40, (side, side + 9, 3), dtype=np.uint8) + np.uint8(level)
    stream = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(stream, kind)
    return stream.getvalue()


def write_photos(root: Path) -> Path:
    """Three classes of eight, and what lies about in people's folders."""
    forms = [
        ("jpg", "JPEG", "RGB"), ("PNG", "PNG", "RGBA"), ("jpeg", "JPEG", "L"), ("bmp", "BMP", "RGB"),
        ("gif", "GIF", "P"), ("webp", "WEBP", "RGB"), ("JPG", "JPEG", "CMYK"), ("png", "PNG", "1"),
    ]  # fmt: skip
    for label, name in enumerate(("bär & honig", "ein Hund", "猫")):
        (root / name).mkdir(parents=True)
        for i, (suffix, kind, mode) in enumerate(forms):
            path = root / name / f"photo {i} (1).{suffix}"
            path.write_bytes(photo(3 * i + label, kind, mode))
    for name in (
        "ein Hund/Thumbs.db",
        "猫/read me.txt",
        "猫/.DS_Store",
        "notes.txt",
        "猫/._photo.jpg",
    ):
        (root / name).write_bytes(b"no photo")
    (root / "later").mkdir()
    (root / ".thumbnails").mkdir()
    (root / "ein Hund" / "broken.jpg").write_bytes(photo(1, "JPEG")[:600])
    return root


def test_photos_in_one_command(call: Call, tmp_path: Path) -> None:
    write_photos(tmp_path / "photos")
    done = call(
        "train", "--data-dir", "photos", "--val-split", "0.2", "--image-size", "16", "--epochs", "2",
        "--model", "resnet_tiny", "-b", "8", "--device", "cpu", "--output", "run",
        "--set", "run.threads=1",
    )  # fmt: skip
    assert (done.code, done.err) == (0, ""), done.err
    found = summary(tmp_path / "run")
    assert found["chosen"]["data"] == "ImageFolder, 19 training and 6 validation images, 3 classes"
    for note in (
        "photos/: no image in later",
        "skipped 2 files that are not images",
        "data.val_split = 0.2: 6 of 25",
    ):
        assert note in found["chosen"]["input"], note
    assert found["corrupt_samples"] + found["corrupt_val_samples"] == 1
    again = call("eval", "run")
    assert again.code == 0, again.err
    assert f"{found['top1']:.2f}" in again.out
