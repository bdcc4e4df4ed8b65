from __future__ import annotations

from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.optim.settings import OptimSettings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "sdg"),
        ("schedule", "cosin"),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("lr_base", -1.0),
        ("lr_base_batch", 0),
        ("momentum", 1.0),
        ("weight_decay", -1e-4),
        ("warmup_epochs", -1.0),
        ("warmup_max_share", 0.0),
        ("warmup_max_share", 1.5),
        ("decay_rate", 0.0),
        ("decay_epochs", (60.0, 30.0)),
        ("decay_over_epochs", 5.0),
        ("decay_over_epochs", float("inf")),
        ("trust_coefficient", 0.0),
        ("eps", -1e-8),
        ("trust_log_interval", -1),
        ("fused", "cuda"),
        ("orthogonal", "most"),
        ("orthogonal", "all"),  # of momentum SGD
    ],
)
def test_a_bad_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"optim\.{field} = "):
        OptimSettings(**{field: value})


def test_a_near_miss_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'sgd'"):
        OptimSettings(name="sdg")


def test_nesterov_without_momentum_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs momentum"):
        OptimSettings(nesterov=True, momentum=0.0)


def test_the_fp16_ablation_has_no_kernels() -> None:
    with pytest.raises(ConfigError, match="optim.fused = 'triton': has no kernels.*use foreach"):
        OptimSettings(name="lars", in_half=True, fused="triton")


@pytest.mark.parametrize(
    ("field", "value"), [("clip", True), ("lr_in_momentum", False), ("in_half", True)]
)
def test_muon_has_no_such_form(field: str, value: bool) -> None:
    with pytest.raises(ConfigError, match=rf"optim\.{field} = {value}: muon has no such form"):
        OptimSettings(name="muon", **{field: value})
