"""Creates the optimizer of `OptimSettings` for the groups of `paceline.models.parameter_groups`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.imports import import_object
from paceline.optim.adam import LAMB, AdamW
from paceline.optim.base import MasterOptimizer
from paceline.optim.fused import triton_unavailable
from paceline.optim.lars import LARS, SGD
from paceline.optim.muon import Muon, split_matrices
from paceline.optim.rms_warmup import RMSpropWarmup
from paceline.optim.setting_rules import OPTIMIZERS_OF_SVRG, SOAP_BETA2
from paceline.optim.settings import OptimSettings
from paceline.optim.soap import SOAP
from paceline.optim.svrg import SVRG
from paceline.optim.wrapped import wrap


def create_optimizer(
    settings: OptimSettings,
    groups: Sequence[dict[str, Any]],
    lr: float,
    factory: Callable[..., Any] | None = None,
    seed: int = 0,
) -> MasterOptimizer:
    """The optimizer that the settings name, or the one that `factory` makes of groups. Groups of role
    `bias_norm` are not adapted unless the settings say so. `seed` is that of stochastic rounding."""
    if factory is not None:
        return wrap("optimizer", getattr(factory, "__name__", "given"), factory, groups)
    if settings.is_class:
        return _create_class(settings, groups, lr)
    fused = {"auto": None, "triton": True, "foreach": False}[settings.fused]
    devices = {p.device for group in groups for p in group["params"]}
    for device in devices if fused else ():
        if problem := triton_unavailable(device):
            raise ConfigError("optim.fused", settings.fused, problem, "use 'auto' or 'foreach'")
    if settings.name in OPTIMIZERS_OF_SVRG:
        return SVRG(
            groups, lr, form=settings.name, bits=settings.bits, mu=settings.halp_mu,
            span=settings.lp_span, seed=seed,
        )  # fmt: skip
    if settings.name == "rmsprop_warmup":
        return RMSpropWarmup(
            groups, lr, settings.momentum, beta2=settings.rms_beta, eps=settings.adam_eps,
            rms_rate=settings.rms_rate,
        )  # fmt: skip
    if settings.name in ("adamw", "lamb"):
        return _create_adam(settings, groups, lr, fused)
    common: dict[str, Any] = {
        "lr": lr, "momentum": settings.momentum, "nesterov": settings.nesterov, "fused": fused,
    }  # fmt: skip
    if settings.name == "sgd":
        return SGD(groups, **common, in_half=settings.in_half)
    common |= {"trust_coefficient": settings.trust_coefficient, "eps": settings.eps}
    if settings.name == "muon":
        return Muon(_muon_groups(settings, groups), **common, products=settings.muon_products)
    if settings.name == "soap":
        beta2 = SOAP_BETA2 if settings.beta2 == OptimSettings.beta2 else settings.beta2
        interval = settings.soap_interval
        return SOAP(_muon_groups(settings, groups), **common, beta2=beta2, interval=interval)
    assert settings.name == "lars", settings.name
    return LARS(
        groups,
        **common,
        lr_in_momentum=settings.lr_in_momentum,
        clip=settings.clip,
        adapt_bias_norm=settings.adapt_bias_norm,
        in_half=settings.in_half,
    )


def _create_adam(
    settings: OptimSettings, groups: Sequence[dict[str, Any]], lr: float, fused: bool | None
) -> AdamW:
    betas = (settings.beta1, settings.beta2)
    if settings.name == "adamw":
        return AdamW(groups, lr, betas, settings.adam_eps, fused=fused)
    return LAMB(
        groups,
        lr,
        betas,
        settings.adam_eps,
        clip=settings.clip,
        trust_eps=settings.eps,
        adapt_bias_norm=settings.adapt_bias_norm,
        fused=fused,
    )


def _create_class(
    settings: OptimSettings, groups: Sequence[dict[str, Any]], lr: float
) -> MasterOptimizer:
    found = import_object("optim.name", settings.name)
    if not callable(found):
        raise ConfigError(
            "optim.name", settings.name, "is not a class", "name an optimizer's class"
        )
    arguments = settings.arguments_table()

    def create(made: list[dict[str, Any]]) -> Any:
        return found(made, lr=lr, **arguments)

    return wrap("optim.name", settings.name, create, groups, found)


def _is_adapted(settings: OptimSettings, group: dict[str, Any]) -> bool:
    return settings.adapt_bias_norm or group.get("role") != "bias_norm"


def _muon_groups(settings: OptimSettings, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Splits a group in two where only some of its tensors are orthogonalized."""
    least_dims = 3 if settings.orthogonal == "filters" else 2
    # Momentum multiplies the rate of a LARS layer by 1 / (1 − m); this keeps the step sizes equal.
    eta = settings.trust_coefficient / (1 - settings.momentum)
    made = []
    for group in groups:
        orthogonal, rest = split_matrices(group, least_dims)
        if orthogonal:
            more = {"adapt": True, "orthogonal": True, "trust_coefficient": eta}
            made.append(group | {"params": orthogonal} | more)
        if rest or not orthogonal:
            adapted = _is_adapted(settings, group)
            made.append(group | {"params": rest, "adapt": adapted, "orthogonal": False})
    return made
