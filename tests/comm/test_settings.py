"""Settings of the exchange: contradictions and impossible values are refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.comm import CommSettings
from paceline.comm.settings import HybridSettings
from paceline.config import RunConfig, parse_assignment
from paceline.core.settings import from_table
from refusals import refused


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("algorithm", {"algorithm": "rings"}),
        ("wire", {"wire": "fp8"}),
        ("overlap", {"overlap": "yes"}),
        ("fusion_mib", {"fusion_mib": float("nan")}),
        ("group_size", {"group_size": -2}),
        ("hybrid.sizes", {"hybrid": {"sizes": "0"}}),
        ("algorithm", {"algorithm": "hybrid"}),
        ("wire", {"plan": "p.toml", "wire": "float16"}),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_field(field: str, values: dict[str, Any]) -> None:
    with refused(f"comm.{field}") as caught:
        from_table(CommSettings, "comm", values)
    assert caught.value.exit_code == 2


def test_a_flag_sets_them() -> None:
    texts = (
        "comm.algorithm=hybrid",
        "comm.hybrid.sizes=256",
        "comm.fusion_mib=8",
        "comm.wire=float16",
    )
    config = RunConfig().with_values(dict(parse_assignment(text) for text in texts))
    assert config.comm == CommSettings(
        algorithm="hybrid",
        owned={"hybrid": HybridSettings("256")},
        fusion_mib=8.0,
        wire="float16",
    )
    assert RunConfig.from_tables(config.to_tables()) == config
