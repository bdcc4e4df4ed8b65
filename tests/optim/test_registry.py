"""An optimizer in one file outside of the package: an update rule, registered under a name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from cli_runs import events
from optim.reference import check_bad_gradient, check_switches, fill_gradients, parameters
from paceline.core.errors import ConfigError
from paceline.optim import (
    MasterOptimizer,
    OptimSettings,
    Rows,
    UpdateRule,
    create_optimizer,
    register_optimizer,
    register_schedule,
)
from paceline.optim.schedules import Course, ScheduleSettings
from refusals import refused
from small_runs import run_small

MIXED = (torch.float16, torch.float32, torch.bfloat16)


class SignMomentum(UpdateRule):
    """v ← m·v + (1−m)·g; w ← w − lr·(sign(v) + βw)."""

    class Hyper(NamedTuple):
        lr: float
        momentum: float = 0.9
        weight_decay: float = 0.0

    buffers = ("momentum_buffer",)

    def update(self, rows: Rows, hyper: Any) -> None:
        momenta = rows.buffers("momentum_buffer")
        for w, g, v in zip(rows.masters, rows.gradients, momenta, strict=True):
            v.lerp_(g, 1 - hyper.momentum)
            w.sub_(hyper.lr * (v.sign() + hyper.weight_decay * w))


@pytest.fixture(autouse=True)
def _registered(registrations: None) -> None:
    register_optimizer("sign_momentum", SignMomentum)


def create(arguments: str = "{momentum = 0.5}") -> tuple[MasterOptimizer, list[Any]]:
    ps = parameters(*MIXED)
    settings = OptimSettings(name="sign_momentum", lr=0.01, arguments=arguments)
    return create_optimizer(settings, [{"params": ps, "weight_decay": 0.1}], 0.01), ps


@pytest.mark.usefixtures("both_ways")
def test_a_registered_rule_gets_masters_loss_scale_and_switches() -> None:
    optimizer, ps = create()
    weights = [p.detach().float().clone() for p in ps]
    optimizer.grad_scale = torch.tensor(4.0)
    fill_gradients(ps, 0, 4.0)
    optimizer.step()
    for p, w, master in zip(ps, weights, optimizer.masters(), strict=True):
        assert torch.allclose(master, w - 0.01 * (p.grad.sign() + 0.1 * w), rtol=1e-6)
        assert torch.equal(p, master.to(p.dtype))
        momentum = optimizer.state[p]["momentum_buffer"]
        assert torch.allclose(momentum, p.grad.float() / 8, rtol=1e-6)
    check_bad_gradient(ps, optimizer, 1, float("nan"))
    check_switches(optimizer)
    saved = optimizer.state_dict()
    other, _ = create()
    other.load_state_dict(saved)
    assert other.param_groups[0]["momentum"] == 0.5


def test_training_by_name(tmp_path: Path) -> None:
    """The name `module:Rule` gives the same bits."""
    name = f"{__name__}:SignMomentum"
    runs = [
        run_small(tmp_path / str(place), optim__name=of, optim__lr=0.001)
        for place, of in enumerate(("sign_momentum", name))
    ]
    assert len({run.summary["weights_sha256"] for run in runs}) == 1


@dataclass(frozen=True)
class Halves(ScheduleSettings):
    """The rate halves after every `epochs`."""

    epochs: float = 2.0

    def rate(self, time: float, course: Course) -> float:
        return course.peak * 0.5 ** (time // (self.epochs * course.steps_per_epoch))


def test_a_schedule_from_outside(tmp_path: Path) -> None:
    """Its settings are the table `[optim.halves]`, also in the config of a run."""
    with pytest.raises(ConfigError):
        OptimSettings(schedule="halves")
    register_schedule("halves", Halves)
    given = {"optim__schedule": "halves", "optim__halves__epochs": 1.0, "optim__warmup_epochs": 0.0}
    run_small(tmp_path, **given, run__epochs=3)
    rates = [event["lr"] for event in events(tmp_path, "step")]
    assert rates[-1] == rates[0] / 4
    assert "[optim.halves]\nepochs = 1.0" in (tmp_path / "config.toml").read_text()
    for name in ("cosine", "one_cycle", "My Schedule"):
        with pytest.raises(ConfigError):
            register_schedule(name, Halves)


def test_what_cannot_be_is_refused() -> None:
    for arguments in ("{beta = 0.5}", "{momentum = 2.0}"):
        with pytest.raises(ConfigError):
            create(arguments)
    with refused("optim.lr"):
        OptimSettings(name="sign_momentum")
    for name in ("sgd", "svrg", "My Rule", "MyRule"):
        with pytest.raises(ConfigError):
            register_optimizer(name, SignMomentum)


def rule(**fields: Any) -> type[UpdateRule]:
    """Returns a rule with these hyper-parameters."""
    hyper = NamedTuple("Hyper", [(name, type_) for name, (type_, *_) in fields.items()])  # type: ignore[misc]
    hyper._field_defaults = {name: own[0] for name, (_, *own) in fields.items() if own}
    return type("Keeps", (UpdateRule,), {"Hyper": hyper, "update": lambda self, rows, h: None})


@pytest.mark.parametrize(
    "kind",
    [
        object, SignMomentum(), type("NoHyper", (UpdateRule,), {}), rule(beta=(float, 0.5)),
        rule(lr=(float,), beta=(float,)), rule(lr=(float,), mode=(str, "a")),
    ],
)  # fmt: skip
def test_hyper_parameters_that_cannot_be_set_are_refused(kind: Any) -> None:
    with refused("rule"):
        register_optimizer("keeps", kind)
