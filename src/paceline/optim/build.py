"""Creates the optimizer of `OptimSettings` for the groups of `paceline.models.parameter_groups`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.optim.lars import LARS, SGD
from paceline.optim.lars_fused import triton_unavailable
from paceline.optim.muon import Muon, is_matrix
from paceline.optim.settings import OptimSettings


def create_optimizer(settings: OptimSettings, groups: Sequence[dict[str, Any]], lr: float) -> LARS:
    """SGD, LARS or Muon. Groups of role `bias_norm` are not adapted unless the settings say so."""
    fused = {"auto": None, "triton": True, "foreach": False}[settings.fused]
    devices = {p.device for group in groups for p in group["params"]}
    for device in devices if fused else ():
        if problem := triton_unavailable(device):
            raise ConfigError("optim.fused", settings.fused, problem, "use 'auto' or 'foreach'")
    common: dict[str, Any] = {
        "lr": lr, "momentum": settings.momentum, "nesterov": settings.nesterov, "fused": fused,
    }  # fmt: skip
    if settings.name == "sgd":
        return SGD(groups, **common, in_half=settings.in_half)
    common |= {"trust_coefficient": settings.trust_coefficient, "eps": settings.eps}
    if settings.name == "muon":
        return Muon(_muon_groups(settings, groups), **common)
    assert settings.name == "lars", settings.name
    return LARS(
        [group | {"adapt": _is_adapted(settings, group)} for group in groups],
        **common,
        lr_in_momentum=settings.lr_in_momentum,
        clip=settings.clip,
        in_half=settings.in_half,
    )


def _is_adapted(settings: OptimSettings, group: dict[str, Any]) -> bool:
    return settings.adapt_bias_norm or group.get("role") != "bias_norm"


def _muon_groups(settings: OptimSettings, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Splits a group in two where only some of its tensors are orthogonalized."""
    least_dims = 3 if settings.orthogonal == "filters" else 2
    # Momentum multiplies the rate of a LARS layer by 1 / (1 − m); this keeps the step sizes equal.
    eta = settings.trust_coefficient / (1 - settings.momentum)
    made = []
    for group in groups:
        orthogonal: list[Tensor] = []
        rest: list[Tensor] = []
        for p in group["params"]:
            chosen = group.get("role") != "bias_norm" and is_matrix(p) and p.dim() >= least_dims
            (orthogonal if chosen else rest).append(p)
        if orthogonal:
            more = {"adapt": True, "orthogonal": True, "trust_coefficient": eta}
            made.append(group | {"params": orthogonal} | more)
        if rest or not orthogonal:
            adapted = _is_adapted(settings, group)
            made.append(group | {"params": rest, "adapt": adapted, "orthogonal": False})
    return made


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
