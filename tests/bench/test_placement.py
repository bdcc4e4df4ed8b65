from __future__ import annotations

from typing import Any

import pytest

from paceline.bench.placement import Placement, parse_bytes, rank_arguments, show_bytes
from paceline.core.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"hosts": -1}, "--hosts = -1: must be at least 1"),
        ({"hosts": 2, "ranks": 2}, "--ranks = 2: cannot be given with --hosts"),
        ({"ranks_per_host": 2}, "--ranks-per-host = 2: needs --hosts"),
        ({"hosts": 2, "ranks_per_host": 0}, "--ranks-per-host = 0: must be at least 1"),
        ({"hosts": 2, "link_mbit": -1.0}, "--link-mbit = -1.0: must be above 0"),
    ],
)
def test_flags_that_contradict_are_told(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Placement(**flags)


def test_a_rank_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert Placement().is_launched()
    with pytest.raises(ConfigError, match="--hosts = 2: this process is a rank of a launcher"):
        Placement(hosts=2).is_launched()


def test_a_rank_gets_the_command_line_without_its_place() -> None:
    given = [
        "tune",
        "--hosts",
        "4",
        "--ranks-per-host=2",
        "--link-mbit",
        "200",
        "-o",
        "x",
        "--ranks=2",
    ]
    assert rank_arguments(given) == ["tune", "--link-mbit", "200", "-o", "x"]
    assert Placement(hosts=2, link_mbit=0.5).rate == "0.5mbit"
    assert Placement(ranks=2).rate is None


def test_sizes_as_people_write_them() -> None:
    texts = ("4096", "64KiB", "64k", "64KB", "1.5M", "2 GiB", "12b")
    found = [parse_bytes("--bytes", text) for text in texts]
    assert found == [4096, 65536, 65536, 64000, 3 << 19, 2 << 30, 12]
    assert [show_bytes(size) for size in (12, 1024, 1536, 3 << 20)] == [
        "12 B", "1 KiB", "1536 B", "3 MiB",
    ]  # fmt: skip
    for text in ("", "x", "-4", "0", "4TB"):
        with pytest.raises(ConfigError, match="--bytes = .*is not a size; write 4096"):
            parse_bytes("--bytes", text)
