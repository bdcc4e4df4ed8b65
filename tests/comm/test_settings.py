"""Settings of the exchange: what contradicts or cannot be is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.comm import CommSettings
from paceline.config import RunConfig, parse_assignment
from paceline.core.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"algorithm": "rings"}, "comm.algorithm = 'rings': unknown; did you mean 'ring'?"),
        (
            {"wire": "fp8"},
            "comm.wire = 'fp8': unknown; known: auto, bfloat16, float16, float32, float8_e4m3, "
            "float8_e5m2, int8",
        ),
        ({"overlap": "yes"}, "comm.overlap = 'yes': unknown; known: auto, off, on"),
        ({"fusion_mib": float("nan")}, "comm.fusion_mib = nan: must be 0 to 65536; try 16"),
        ({"group_size": -2}, "comm.group_size = -2: must be 0 (the ranks of a node) or more"),
        ({"eta_kib": 0}, "comm.eta_kib = 0: must be 1 or more; try 1024"),
        (
            {"algorithm": "hybrid"},
            "comm.algorithm = 'hybrid': needs a table of sizes; give comm.sizes, a file that "
            "`paceline tune` writes, or comm.eta_kib",
        ),
        (
            {"algorithm": "hybrid", "sizes": "a.toml", "eta_kib": 4},
            "comm.eta_kib = 4: but comm.sizes = 'a.toml' is a table already; leave one of the two "
            "out",
        ),
        (
            {"algorithm": "ring", "sizes": "a.toml"},
            "comm.sizes = 'a.toml': has no meaning with comm.algorithm = 'ring'; set "
            "comm.algorithm to 'hybrid'",
        ),
        (
            {"eta_kib": 4},
            "comm.eta_kib = 4: has no meaning with comm.algorithm = 'auto'; set comm.algorithm to "
            "'hybrid'",
        ),
        (
            {"plan": "p.toml", "wire": "float16"},
            "comm.wire = 'float16': but comm.plan = 'p.toml' decides it; leave one of the two out",
        ),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_one_line(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CommSettings(**values)
    assert str(caught.value) == line
    assert caught.value.exit_code == 2


def test_a_flag_sets_them() -> None:
    texts = ("comm.algorithm=hybrid", "comm.eta_kib=256", "comm.fusion_mib=8", "comm.wire=float16")
    config = RunConfig().with_values(dict(parse_assignment(text) for text in texts))
    assert config.comm == CommSettings(
        algorithm="hybrid", eta_kib=256, fusion_mib=8.0, wire="float16"
    )
    assert RunConfig.from_tables(config.to_tables()) == config
