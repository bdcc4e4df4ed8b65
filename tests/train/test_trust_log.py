from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.core.events import StepEvent, TrustEvent
from paceline.optim.settings import OptimSettings
from paceline.train import loop
from paceline.train.run import run_training
from paceline.train.step import TrainStep
from small_runs import Silent, small_config

LARS: dict[str, Any] = {"optim__name": "lars", "optim__trust_coefficient": 0.02}


def logged(output: Path, **values: Any) -> tuple[list[TrustEvent], list[str], list[dict[str, Any]]]:
    """Events, names of the parameters, and the records on disk."""
    display = Silent()
    run_training(small_config(output, **values), lambda: display)
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    events = [event for event in display.events if isinstance(event, TrustEvent)]
    assert [event.step for event in display.events if isinstance(event, StepEvent)][-1] == 7
    names = sorted(events[0].ratios) if events else []
    return events, names, [record for record in records if record["event"] == "trust"]


def test_no_ratio_is_read_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "TrustEvent", None)  # reading them would wait for the device
    assert logged(tmp_path / "a", **LARS) == ([], [], [])


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_so_many_steps_each_parameter_has_a_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, lag: int
) -> None:
    monkeypatch.setattr(TrainStep, "lag", lag)
    events, names, records = logged(
        tmp_path / "a", **LARS, optim__trust_log_interval=3, precision__amp_dtype=dtype
    )
    assert [event.step for event in events] == [3, 6]
    assert len(names) == 38
    assert {"conv1.weight", "bn1.bias", "fc.weight"} <= set(names)
    for event, record in zip(events, records, strict=True):
        assert record["ratios"] == event.ratios
        adapted = {name: r for name, r in event.ratios.items() if name.endswith("weight")}
        assert 0 < adapted["conv1.weight"] != 1.0
        assert event.ratios["bn1.weight"] == event.ratios["fc.bias"] == 1.0
    assert events[0].ratios["conv1.weight"] != events[1].ratios["conv1.weight"]


def test_sgd_has_no_ratios_to_log() -> None:
    with pytest.raises(ConfigError, match="optim.trust_log_interval = 7: sgd has no trust ratios"):
        OptimSettings(name="sgd", trust_log_interval=7)
