"""Registers optimizers and schedules by name, for `optim.name` and `optim.schedule`.

Each optimizer or schedule has a dataclass with its properties and with the settings in the table
`[optim.NAME]`. This module lists the optimizers and schedules of the core. `paceline.alternatives`
adds more, and programs can add some with `register_optimizer` and `register_schedule`. This module
does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

from paceline.core.errors import ConfigError, nearest
from paceline.core.extensions import Registry, check_new_name, missing_packages
from paceline.core.settings import register_settings
from paceline.optim.schedules import OwnerSettings, ScheduleSettings

if TYPE_CHECKING:
    from paceline.optim.rule import UpdateRule

SGD, ADAM = "sgd", "adam"


class Context(NamedTuple):
    """Further arguments of the functions that create optimizers.

    Attributes:
        fused: The implementation, as in `MasterOptimizer`.
        seed: Seed of stochastic rounding.
        norms: Number of norm layers in the model.
    """

    fused: bool | None
    seed: int
    norms: int


class OptimizerSettings(OwnerSettings):
    """Base class of the settings of an optimizer; subclasses are frozen dataclasses.

    Attributes:
        CREATE: `module:function` inside `paceline` that creates the optimizer from `OptimSettings`,
            parameter groups, learning rate and `Context`.
        RATES: Kind of the optimizer's learning rates: like those of `sgd`, like those of `adam`, or ""
            for others. A recipe's learning rate is dropped if the command line chooses an optimizer
            whose learning rates are not like those of SGD.
        LR_BASE: Peak learning rate at a batch of 256 if `optim.lr_base` is not set.
        HAS_KERNELS: True if the update has Triton kernels.
        GRADIENTS: Name of the gradient source that the optimizer needs (`paceline.train.micro_step`).
        PINNED: Names of the settings that a resumed run must not change.
        share_products: Whether ranks divide matrix products, as in `MuonSettings`.
    """

    CREATE: ClassVar[str] = ""
    RATES: ClassVar[str] = ""
    LR_BASE: ClassVar[float] = 0.1
    HAS_KERNELS: ClassVar[bool] = False
    GRADIENTS: ClassVar[str] = "backward"
    PINNED: ClassVar[tuple[str, ...]] = ()
    share_products: str = "auto"

    def passes(self, steps_per_epoch: float) -> float:
        """Returns how often a step computes the gradient of each sample, on average."""
        return 1.0


_OPTIMIZERS = {
    "sgd": "optim.rule_settings:SgdSettings", "lars": "optim.rule_settings:LarsSettings",
    "muon": "optim.rule_settings:MuonSettings", "adamw": "optim.rule_settings:AdamwSettings",
    "lamb": "optim.rule_settings:LambSettings",
}  # fmt: skip
_SCHEDULES = {
    "constant": "optim.schedules:Constant", "cosine": "optim.schedules:Cosine",
    "poly": "optim.schedules:Poly", "step": "optim.schedules:Step",
    "piecewise": "optim.schedules:Piecewise", "exponential": "optim.schedules:Exponential",
}  # fmt: skip
OWNERS = {**_OPTIMIZERS, **_SCHEDULES, "adam": "optim.rule_settings:AdamSettings"}
_optimizers: Registry[type[OptimizerSettings]] = Registry("optimizers", _OPTIMIZERS)
_schedules: Registry[type[ScheduleSettings]] = Registry("schedules", _SCHEDULES)
_rules: Registry[type[UpdateRule]] = Registry("rules", {})


def register_optimizer(name: str, rule: type[UpdateRule]) -> None:
    """Registers an optimizer for this process. A second call with the name replaces the first.

    Training passes the scheduled learning rate, the weight decay of each group, and the values in
    `optim.arguments` as hyper-parameters.

    Args:
        name: The name, to be used as `optim.name`.
        rule: Subclass of `UpdateRule` with the equation; see docs/optimizers.md.

    Raises:
        ConfigError: If the name is taken, or if the hyper-parameters of the rule cannot be set.
    """
    check_new_name(name, taken=name in _optimizers)
    check_rule(rule)
    _rules.register(name, rule)


def check_rule(rule: type[UpdateRule]) -> None:
    """Raises ConfigError unless `rule.Hyper` has a field `lr` and defaults for all other fields."""
    fields = getattr(getattr(rule, "Hyper", None), "_fields", ())
    shown = getattr(rule, "__name__", rule)
    if not isinstance(rule, type) or "lr" not in fields:
        problem = "is not an UpdateRule with a class Hyper(NamedTuple) that has lr"
        raise ConfigError("rule", shown, problem, "see docs/optimizers.md")
    defaults = rule.Hyper._field_defaults
    for field in fields:
        if field != "lr" and not isinstance(defaults.get(field), int | float):
            problem = f"Hyper.{field} has no number or boolean as its default"
            raise ConfigError("rule", shown, problem, f"write {field}: float = 0.0")


def register_schedule(name: str, kind: type[ScheduleSettings]) -> None:
    """Registers a schedule for this process. A second call with the name replaces the first.

    Args:
        name: The name, to be used as `optim.schedule`.
        kind: The class of the schedule, which is also the dataclass of the settings `[optim.NAME]`.

    Raises:
        ConfigError: If the name is taken.
    """
    check_new_name(name, taken=name in OWNERS)
    register_settings("optim", name, kind)
    _schedules.register(name, kind)


def optimizer_names() -> list[str]:
    """Returns all names of optimizers; those that programs have registered come last."""
    return [*_optimizers.names(), *_rules.names()]


def schedule_names() -> list[str]:
    """Returns all names of learning-rate schedules."""
    return _schedules.names()


def check_optimizer(name: str) -> None:
    """Raises ConfigError, with the most similar name, if there is no optimizer `name`."""
    if name not in _rules and name not in _optimizers:
        hint = nearest(name, optimizer_names()) + missing_packages()
        remedy = f"{hint} (a class is written torch.optim:RAdam)"
        raise ConfigError("optim.name", name, "unknown", remedy)


def check_schedule(name: str) -> None:
    """Raises ConfigError, with the most similar name, if there is no schedule `name`."""
    _schedules.get(name, "optim.schedule")


def registered_rule(name: str) -> type[UpdateRule] | None:
    """Returns the optimizer that a program has registered under `name`; None if there is none."""
    return _rules.outside().get(name)
