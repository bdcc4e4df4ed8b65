from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import DataError
from paceline.data.sources.class_list import numbered_classes, read_classes


@pytest.mark.parametrize(
    "content",
    [
        [{"cls": 1, "name": "dog"}, {"cls": 0, "name": "cat"}],
        {"dog": 1, "cat": 0},
        ["cat", "dog"],
        [{"cls": 0, "wnid": "cat"}, {"cls": 1, "wnid": "n2", "name": "dog"}],
    ],
)
def test_every_form(tmp_path: Path, content: object) -> None:
    (tmp_path / "classes.json").write_text(json.dumps(content))
    assert read_classes(tmp_path) == ["cat", "dog"]


def test_absent_is_not_wrong(tmp_path: Path) -> None:
    assert read_classes(tmp_path) is None
    assert numbered_classes(3) == ["0", "1", "2"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        "3",
        '[{"cls": 0, "name": "a"}, {"cls": 2, "name": "b"}]',
        '[{"cls": 0, "name": "a"}, {"cls": 0, "name": "b"}]',
        '[{"cls": 1, "name": "a"}]',
        '[{"cls": "0", "name": "a"}]',
        '[{"cls": true, "name": "a"}, {"cls": 0, "name": "b"}]',
        '[{"cls": 0}]',
        '{"a": 0.0}',
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "classes.json").write_text(text)
    with pytest.raises(DataError, match=r"classes\.json: .*write it as"):
        read_classes(tmp_path)


def test_not_text(tmp_path: Path) -> None:
    (tmp_path / "classes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="is not JSON"):
        read_classes(tmp_path)
