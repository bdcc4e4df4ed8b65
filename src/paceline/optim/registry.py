"""Optimizers by name, as `optim.name` has them; modules are imported when an optimizer is created.

Paceline's own names are listed here. `register_optimizer` adds the update rule of a package or program.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.core.errors import ConfigError
from paceline.core.extensions import load_extension

if TYPE_CHECKING:
    from paceline.optim.rule import UpdateRule


class Context(NamedTuple):
    """What an optimizer is created with beside settings, groups and rate: `fused` as in
    `MasterOptimizer`, the `seed` of stochastic rounding, and the model's number of norm layers."""

    fused: bool | None
    seed: int
    norms: int


# Module and function that creates each of Paceline's own optimizers.
_OWN = {
    "sgd": "lars:create_sgd", "lars": "lars:create_lars", "muon": "muon_groups:create_muon",
    "adamw": "adam:create_adamw", "lamb": "adam:create_lamb",
    "rmsprop_warmup": "rms_warmup:create",
    **dict.fromkeys(("halp", "lp_sgd", "lp_svrg", "svrg"), "svrg:create"),
}  # fmt: skip
_registered: dict[str, type[UpdateRule]] = {}


def register_optimizer(name: str, rule: type[UpdateRule]) -> None:
    """Makes `name` an optimizer of this process, with `rule` as its equation.

    Training creates it with the rate of the schedule, the weight decay of the groups and
    `optim.arguments` as further hyper-parameters. A second call replaces the first.
    """
    if not re.fullmatch(r"[a-z]\w*", name):
        raise ConfigError(
            "name", name, "is not a name of an optimizer", "use letters, digits and underscores"
        )
    if name in _OWN:
        raise ConfigError("name", name, "is one of Paceline's own", "choose another name")
    _registered[name] = rule


def optimizer_names() -> list[str]:
    """All names, those that were registered last."""
    return [*_OWN, *_registered]


def registered_rule(name: str) -> type[UpdateRule] | None:
    """The rule of a name that is not one of Paceline's own."""
    return _registered.get(name)


def own_creator(name: str) -> Callable[..., Any]:
    """The function that creates one of Paceline's own optimizers."""
    module, function = _OWN[name].split(":")
    module_loaded = load_extension(f"optim.{module}", "optim.name", name)
    found: Callable[..., Any] = getattr(module_loaded, function)
    return found
