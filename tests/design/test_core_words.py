"""Core packages do not mention extensions: no import, branch, setting, record field or checkpoint key."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
CORE = ("core", "plan", "data", "models", "precision", "optim", "comm", "config", "train",
        "custom_loop", "trainer.py")  # fmt: skip


@pytest.mark.parametrize("word", ["rehears"])
def test_the_core_does_not_mention_an_extension(word: str) -> None:
    files = [file for name in CORE for file in (ROOT / name, *(ROOT / name).rglob("*.py"))]
    found = [file for file in files if file.is_file() and word in file.read_text().lower()]
    assert found == []
