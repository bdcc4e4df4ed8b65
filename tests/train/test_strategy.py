"""A strategy of another package: its settings, exclusions, records, state and part in each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

from cli_runs import events
from paceline.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.core.exclusions import Exclusion, switched_off
from paceline.core.extensions import temporary_registrations
from paceline.core.settings import SettingChecks
from paceline.optim import UpdateRule, register_optimizer, register_schedule
from paceline.optim.schedules import Course, ScheduleSettings
from paceline.plan import Wire, register_wire
from paceline.train import Checkpoint, EvalResult, evaluate_file
from paceline.train.export import export_stored_weights
from paceline.train.inference import Predictor
from paceline.train.step import StepOutcome
from paceline.train.strategy import Pending, Synchronous, register_strategy, strategy_class
from refusals import refused
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

    def finish(self, rate: float, hyperparameters: Mapping[str, float] | None) -> Pending:
        self._steps += 1
        rate *= self.config.run.of(self.name, SlowedSettings).factor
        return super().finish(rate, hyperparameters)

    def record(self, outcome: StepOutcome) -> Mapping[str, Any]:
        return {**super().record(outcome), "slowed_steps": self._steps}

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def summary(self) -> dict[str, Any]:
        return {"slowed_steps": self._steps}

    def describe(self) -> dict[str, str]:
        return {"slowed": "half the rate"}


@pytest.fixture
def slowed(registrations: None) -> None:
    register_strategy(Slowed, SlowedSettings)


@pytest.mark.usefixtures("slowed")
def test_a_run_steps_records_saves_and_resumes(tmp_path: Path) -> None:
    half = run_small(tmp_path / "half", optim__lr=0.05).summary
    own = {"optim__lr": 0.1, "run__strategy": "slowed", "checkpoint__interval_steps": 3}
    whole = run_small(tmp_path / "a", checkpoint__keep=9, **own).summary
    assert whole["weights_sha256"] == half["weights_sha256"]
    assert whole["chosen"]["slowed"] == "half the rate"
    assert whole["slowed_steps"] == 7
    slowed = [step["slowed_steps"] for step in events(tmp_path / "a", "step")]
    assert slowed == list(range(1, 8))
    assert 'strategy = "slowed"' in (tmp_path / "a/config.toml").read_text()
    saved = tmp_path / "a/checkpoints/step-00000003.pt"
    assert Checkpoint.read(saved).strategy == {"slowed": {"steps": 3}}
    again = run_small(tmp_path / "b", run__resume=str(saved), **own).summary
    assert again["weights_sha256"] == whole["weights_sha256"]
    assert again["slowed_steps"] == 7


@pytest.mark.usefixtures("slowed")
@pytest.mark.parametrize(
    ("name", "value"),
    [("run.slowed.factor", 2.0), ("run.slowed.speed", 1), ("run.noise_scale", True)],
)
def test_its_settings_and_exclusions_are_checked(name: str, value: object) -> None:
    with refused(name):
        RunConfig().with_values({"run.strategy": "slowed", name: value})


def test_a_name_is_looked_up_when_it_is_chosen() -> None:
    with temporary_registrations():
        register_strategy(Slowed, SlowedSettings)
        assert strategy_class(RunConfig().with_values({"run.strategy": "slowed"})) is Slowed
    assert strategy_class(RunConfig()) is Synchronous
    with refused("run.strategy"):
        RunConfig().with_values({"run.strategy": "slowed"})


def test_names_are_checked() -> None:
    class Nameless(Slowed):
        pass

    found: list[Any] = [Nameless, object, Slowed(RunConfig(), None)]  # type: ignore[arg-type]
    found += [type("Own", (Synchronous,), {"name": n}) for n in ("synchronous", "rehearsal", "a-b")]
    for kind in found:
        with pytest.raises(ConfigError):
            register_strategy(kind)


@pytest.mark.usefixtures("registrations")
@pytest.mark.parametrize("found", [{"loss": 1.0}, {"time": 0}, None, 3])
@pytest.mark.parametrize("method", ["record", "record_evaluation"])
def test_a_record_keeps_what_is_paceline_s(tmp_path: Path, method: str, found: Any) -> None:
    body = {"name": "bold", method: lambda self, *given, **named: found}
    register_strategy(type("Bold", (Synchronous,), body))
    with refused(f"bold.{method}"):
        run_small(tmp_path, run__strategy="bold", run__epochs=1)


class Rows(UpdateRule):
    class Hyper(NamedTuple):
        lr: float

    def update(self, rows: Any, hyper: Any) -> None:
        torch._foreach_sub_(rows.masters, rows.gradients, alpha=hyper.lr)


@dataclass(frozen=True)
class Falling(ScheduleSettings):
    share: float = 0.5

    def rate(self, time: float, course: Course) -> float:
        return course.peak * self.share


def test_a_run_of_registered_parts_is_used_without_them(tmp_path: Path) -> None:
    wire = Wire("own", 16, algorithm="sums", cost=lambda c, m: m, create="no.such:place")
    with temporary_registrations():
        register_strategy(Slowed, SlowedSettings)
        register_optimizer("rows", Rows)
        register_schedule("falling", Falling)
        register_wire(wire)
        chosen = {"optim__name": "rows", "optim__schedule": "falling", "run__strategy": "slowed"}
        run_small(
            tmp_path, **chosen, comm__wire="own", run__slowed__factor=0.9, optim__falling__share=0.2
        )
    (path, *_) = sorted((tmp_path / "checkpoints").glob("*.pt"))
    result, _, _ = evaluate_file(path, {"run.device": "cpu"}, 16)
    assert isinstance(result, EvalResult)
    Predictor.load(path)
    assert "tensors" in export_stored_weights(path, tmp_path / "net.safetensors")
