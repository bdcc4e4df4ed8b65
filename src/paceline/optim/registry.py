"""Optimizers and schedules by name, as `optim.name` and `optim.schedule` have them. Without torch.

The settings class of an optimizer or a schedule, the table `[optim.NAME]`, also declares what the core
has to know about it. The core's own are listed here, `paceline.alternatives` has more, and
`register_optimizer` and `register_schedule` add those of a program.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from paceline.core.errors import ConfigError, nearest
from paceline.core.extensions import Registry, missing_packages, provided
from paceline.core.settings import register_settings
from paceline.optim.schedules import OwnerSettings, ScheduleSettings

if TYPE_CHECKING:
    from paceline.optim.rule import UpdateRule

SGD, ADAM = "sgd", "adam"


class Context(NamedTuple):
    """What an optimizer is created with in addition to settings, groups and rate: `fused` as in
    `MasterOptimizer`, the `seed` of stochastic rounding, and the model's number of norm layers."""

    fused: bool | None
    seed: int
    norms: int


class OptimizerSettings(OwnerSettings):
    """Base of the settings of an optimizer; subclasses are frozen dataclasses.

    Attributes:
        CREATE: `module:function` inside `paceline` that creates it from `OptimSettings`, parameter
            groups, rate and `Context`.
        RATES: `sgd` or `adam`, the scale of its rates; empty for another one. A recipe's rate is dropped
            if the command line chooses an optimizer with rates of another scale than those of SGD.
        LR_BASE: Peak rate at a batch of 256 if `optim.lr_base` is not set.
        HAS_KERNELS: True if the update has Triton kernels.
        GRADIENTS: The gradient source that it needs (`paceline.train.micro_step`).
        PINNED: Its own settings that a resumed run must not change.
        share_products: If ranks share products of matrices, see `MuonSettings`; for rules that have some.
    """

    CREATE: ClassVar[str] = ""
    RATES: ClassVar[str] = ""
    LR_BASE: ClassVar[float] = 0.1
    HAS_KERNELS: ClassVar[bool] = False
    GRADIENTS: ClassVar[str] = "backward"
    PINNED: ClassVar[tuple[str, ...]] = ()
    share_products: str = "auto"

    def passes(self, steps_per_epoch: float) -> float:
        """Returns how many gradients the optimizer computes of each sample that a step sees."""
        return 1.0


_OPTIMIZERS = {
    "sgd": "optim.rule_settings:SgdSettings", "lars": "optim.rule_settings:LarsSettings",
    "muon": "optim.rule_settings:MuonSettings", "adamw": "optim.rule_settings:AdamwSettings",
    "lamb": "optim.rule_settings:LambSettings",
}  # fmt: skip
_SCHEDULES = {
    "constant": "optim.schedules:Constant", "cosine": "optim.schedules:Cosine",
    "poly": "optim.schedules:Poly", "step": "optim.schedules:Step",
    "piecewise": "optim.schedules:Piecewise",
}  # fmt: skip
OWNERS = {**_OPTIMIZERS, **_SCHEDULES, "adam": "optim.rule_settings:AdamSettings"}
_optimizers: Registry[type[OptimizerSettings]] = Registry("optimizers", _OPTIMIZERS)
_schedules: Registry[type[ScheduleSettings]] = Registry("schedules", _SCHEDULES)
_registered: dict[str, type[UpdateRule]] = {}


def register_optimizer(name: str, rule: type[UpdateRule]) -> None:
    """Makes `name` an optimizer of this process, with `rule` as its equation.

    Training creates it with the rate of the schedule, the weight decay of the groups and
    `optim.arguments` as further hyper-parameters. A second call replaces the first.
    """
    _check_new("optimizer", name, name in _optimizers)
    _registered[name] = rule


def register_schedule(name: str, kind: type[ScheduleSettings]) -> None:
    """Makes `name` a schedule of this process, with the settings `[optim.NAME]`. A second call replaces
    the first."""
    _check_new("schedule", name, name in OWNERS or name in provided("schedules"))
    _schedules.register(name, kind)
    register_settings("optim", name, kind)


def _check_new(what: str, name: str, taken: bool) -> None:
    if not re.fullmatch(r"[a-z]\w*", name):
        article = "an" if what == "optimizer" else "a"
        raise ConfigError(
            "name",
            name,
            f"is not a name of {article} {what}",
            "use letters, digits and underscores",
        )
    if taken:
        raise ConfigError("name", name, "is one of Paceline's own", "choose another name")


def optimizer_names() -> list[str]:
    """Returns all names of optimizers, those that were registered last."""
    return [*_optimizers.names(), *_registered]


def schedule_names() -> list[str]:
    """Returns all names of schedules."""
    return _schedules.names()


def check_optimizer(name: str) -> None:
    """Raises ConfigError, with the nearest name, if there is no optimizer of this name."""
    if name not in _registered and name not in _optimizers:
        hint = nearest(name, optimizer_names()) + missing_packages()
        remedy = f"{hint} (a class is written torch.optim:RAdam)"
        raise ConfigError("optim.name", name, "unknown", remedy)


def check_schedule(name: str) -> None:
    """Raises ConfigError, with the nearest name, if there is no schedule of this name."""
    _schedules.get(name, "optim.schedule")


def registered_rule(name: str) -> type[UpdateRule] | None:
    """Returns the rule of a name that a program has registered."""
    return _registered.get(name)
