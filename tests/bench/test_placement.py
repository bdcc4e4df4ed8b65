from __future__ import annotations

from typing import Any

import pytest

from paceline.cli.options import Placement
from paceline.core.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"hosts": -1}, "--hosts = -1: must be at least 1"),
        ({"hosts": 2, "ranks": 2}, "--nproc-per-node = 2: cannot be given with --hosts"),
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


def test_the_rate_of_links() -> None:
    assert Placement(hosts=2, link_mbit=0.5).rate == "0.5mbit"
    assert Placement(ranks=2).rate is None
