from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.comm.size_table import SizeRow, SizeTable
from paceline.core.errors import ConfigError

THREE = SizeTable((SizeRow("hierarchical", 4096), SizeRow("torus2d", 1 << 20), SizeRow("native")))


def test_the_papers_switch() -> None:
    table = SizeTable.two_way(1 << 20)
    assert table.choose((1 << 20) - 1) == "hierarchical"
    assert table.choose(1 << 20) == "ring"
    assert SizeTable.two_way(0).algorithms == ("ring",)


def test_choice_by_size() -> None:
    sizes = (0, 4096, 4097, 1 << 20, 1 << 30)
    assert [THREE.choose(size) for size in sizes] == [
        "hierarchical", "hierarchical", "torus2d", "torus2d", "native",
    ]  # fmt: skip
    assert THREE.algorithms == ("hierarchical", "torus2d", "native")


def test_toml_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "table.toml"
    THREE.write(path)
    assert SizeTable.read(path) == THREE
    assert "up_to_bytes = 4096" in path.read_text()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "not a size table"),
        ({"sizes": []}, "has no row"),
        ({"sizes": [{"algorithm": "rign"}]}, "did you mean 'ring'"),
        ({"sizes": [{"algorithm": "ring", "up_to": 3}]}, "not a row"),
        ({"sizes": [{"algorithm": "ring", "up_to_bytes": 3}]}, "leave it out in the last row"),
        ({"sizes": [{"algorithm": "ring"}, {"algorithm": "tree"}]}, "every row but the last"),
        (
            {
                "sizes": [
                    {"algorithm": "ring", "up_to_bytes": 9},
                    {"algorithm": "tree", "up_to_bytes": 9},
                    {"algorithm": "ring"},
                ]
            },
            "above 9; sort the rows",
        ),
        ({"sizes": [{"algorithm": "ring", "up_to_bytes": "9"}, {"algorithm": "ring"}]}, "whole"),
    ],
)
def test_bad_tables_are_told(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SizeTable.from_table(table)


def test_unreadable_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        SizeTable.read(tmp_path / "none.toml")
