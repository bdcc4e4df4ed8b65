"""A strategy of another package: its settings, exclusions, records, state and part in each step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from paceline.config import STRATEGIES, RunConfig
from paceline.core import settings
from paceline.core.errors import ConfigError
from paceline.core.exclusions import Exclusion, switched_off
from paceline.core.settings import SettingChecks
from paceline.train import Checkpoint
from paceline.train.step import StepOutcome
from paceline.train.strategy import Pending, Synchronous, register_strategy, strategy_class
from small_runs import run_small


@dataclass(frozen=True)
class SlowedSettings:
    factor: float = 0.5

    def __post_init__(self) -> None:
        SettingChecks("run.slowed", self).number("factor", "in (0, 1]")

    EXCLUSIONS: ClassVar[tuple[Exclusion, ...]] = switched_off(
        {"run.noise_scale": False}, "is not supported with run.strategy = 'slowed'"
    )


class Slowed(Synchronous):
    """Updates at a part of the schedule's rate."""

    name = "slowed"
    _steps = 0

    def load(self, saved: Mapping[str, Any]) -> None:
        self._steps = saved.get("steps", 0)

    def finish(self, rate: float, others: Mapping[str, float] | None) -> Pending:
        self._steps += 1
        return super().finish(rate * self.config.run.of(self.name, SlowedSettings).factor, others)

    def record(self, outcome: StepOutcome) -> Mapping[str, Any]:
        return {"slowed_steps": self._steps}

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def summary(self) -> dict[str, Any]:
        return {"slowed_steps": self._steps}

    def describe(self) -> dict[str, str]:
        return {"slowed": "half the rate"}


def forget() -> None:
    """The registries are of a process, which has other tests."""
    STRATEGIES._parts.pop(Slowed.name, None)
    settings._registries.clear()


@pytest.fixture(autouse=True)
def slowed() -> Iterator[None]:
    register_strategy(Slowed, SlowedSettings)
    yield
    forget()


def test_a_run_steps_records_saves_and_resumes(tmp_path: Path) -> None:
    half = run_small(tmp_path / "half", optim__lr=0.05).summary
    own = {"optim__lr": 0.1, "run__strategy": "slowed", "checkpoint__interval_steps": 3}
    whole = run_small(tmp_path / "a", checkpoint__keep=9, **own).summary
    assert whole["weights_sha256"] == half["weights_sha256"]
    assert whole["chosen"]["slowed"] == "half the rate"
    assert whole["slowed_steps"] == 7
    lines = (tmp_path / "a/metrics.jsonl").read_text().splitlines()
    steps = [e for e in map(json.loads, lines) if e["event"] == "step"]
    assert [step["slowed_steps"] for step in steps] == list(range(1, 8))
    assert 'strategy = "slowed"' in (tmp_path / "a/config.toml").read_text()
    saved = tmp_path / "a/checkpoints/step-00000003.pt"
    assert Checkpoint.read(saved).strategy == {"slowed": {"steps": 3}}
    again = run_small(tmp_path / "b", run__resume=str(saved), **own).summary
    assert again["weights_sha256"] == whole["weights_sha256"]
    assert again["slowed_steps"] == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [("run.slowed.factor", 2.0), ("run.slowed.speed", 1), ("run.noise_scale", True)],
)
def test_its_settings_and_exclusions_are_checked(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig().with_values({"run.strategy": "slowed", name: value})
    assert caught.value.field == name


def test_a_name_is_looked_up_when_it_is_chosen() -> None:
    assert strategy_class(RunConfig().with_values({"run.strategy": "slowed"})) is Slowed
    assert strategy_class(RunConfig()) is Synchronous
    forget()
    with pytest.raises(ConfigError) as caught:
        RunConfig().with_values({"run.strategy": "slowed"})
    assert caught.value.field == "run.strategy"
