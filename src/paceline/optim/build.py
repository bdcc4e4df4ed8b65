"""From settings to an optimizer.

In: parameter groups as `paceline.models.parameter_groups` makes them. Out: SGD, LARS or Muon, whose
rate the training loop sets before every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.core.errors import ConfigError
from paceline.optim.lars import LARS, SGD
from paceline.optim.lars_fused import triton_is_usable
from paceline.optim.muon import Muon, is_matrix
from paceline.optim.settings import OptimSettings


def create_optimizer(settings: OptimSettings, groups: Sequence[dict[str, Any]], lr: float) -> LARS:
    """Groups of role `bias_norm` keep the global rate unless the settings adapt them."""
    fused = {"auto": None, "triton": True, "foreach": False}[settings.fused]
    devices = {p.device for group in groups for p in group["params"]}
    for device in devices if fused else ():
        if problem := triton_is_usable(device):
            raise ConfigError("optim.fused", settings.fused, problem, "use 'auto' or 'foreach'")
    if settings.name == "sgd":
        return SGD(
            groups,
            lr,
            settings.momentum,
            nesterov=settings.nesterov,
            fused=fused,
            in_half=settings.in_half,
        )
    if settings.name == "muon":
        return _muon(settings, groups, lr, fused)
    assert settings.name == "lars", settings.name
    exempt = set() if settings.adapt_bias_norm else {"bias_norm"}
    return LARS(
        [group | {"adapt": group.get("role") not in exempt} for group in groups],
        lr,
        settings.momentum,
        trust_coefficient=settings.trust_coefficient,
        eps=settings.eps,
        nesterov=settings.nesterov,
        lr_in_momentum=settings.lr_in_momentum,
        clip=settings.clip,
        fused=fused,
        in_half=settings.in_half,
    )


def _muon(
    settings: OptimSettings, groups: Sequence[dict[str, Any]], lr: float, fused: bool | None
) -> Muon:
    """Each group in two, where only some of its tensors are made orthogonal."""
    exempt = set() if settings.adapt_bias_norm else {"bias_norm"}
    least = 3 if settings.orthogonal == "filters" else 2
    made = []
    for group in groups:
        adapts = group.get("role") not in exempt
        weights = group.get("role") != "bias_norm"
        chosen = [p for p in group["params"] if weights and is_matrix(p) and p.dim() >= least]
        known = {id(p) for p in chosen}
        rest = [p for p in group["params"] if id(p) not in known]
        if chosen:
            # In LARS momentum multiplies a layer's rate by 1 / (1 − m): this way all keep one pace.
            eta = settings.trust_coefficient / (1 - settings.momentum)
            more = {"adapt": True, "orthogonal": True, "trust_coefficient": eta}
            made.append(group | {"params": chosen} | more)
        if rest or not chosen:
            made.append(group | {"params": rest, "adapt": adapts, "orthogonal": False})
    return Muon(
        made,
        lr,
        settings.momentum,
        trust_coefficient=settings.trust_coefficient,
        eps=settings.eps,
        nesterov=settings.nesterov,
        fused=fused,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Gives every group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
