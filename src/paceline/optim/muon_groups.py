"""Creates Muon from the settings: which tensors are orthogonalized, and how long their steps are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paceline.optim.base import BIAS_NORM
from paceline.optim.muon import STEP_FACTOR, Muon, split_matrices
from paceline.optim.registry import Context
from paceline.optim.rule_settings import MuonSettings
from paceline.optim.settings import OptimSettings

# Nets with more orthogonalized matrices without a norm have shorter steps of fixed length; shorter ones
# than by this factor have not been tried.
SHALLOW_MATRICES, LEAST_STEP_FACTOR = 4, 0.5


def create_muon(
    settings: OptimSettings, groups: Sequence[dict[str, Any]], lr: float, context: Context
) -> Muon:
    own = settings.of("muon", MuonSettings)
    return Muon(
        _muon_groups(own, settings.momentum, groups, context.norms),
        lr,
        settings.momentum,
        nesterov=settings.nesterov,
        trust_coefficient=own.trust_coefficient,
        fused=context.fused,
    )


def orthogonal_layers(wanted: str, groups: Sequence[dict[str, Any]]) -> str:
    """What `auto` means for these groups: `all` in a perceptron, a transformer or ConvNeXt. The last
    linear layer, the classifier, does not count: with many classes it is large in every net."""
    if wanted != "auto":
        return wanted
    matrices = [p for group in groups for p in split_matrices(group, 2)[0]]
    linear = [p.numel() for p in matrices if p.dim() == 2][:-1]
    filters = [p.numel() for p in matrices if p.dim() > 2]
    return "all" if sum(linear) >= sum(filters) else "filters"


def has_fixed_steps(wanted: str, matrices: Sequence[Tensor], norms: int) -> bool:
    """What `auto` means for a net with these orthogonalized matrices and so many norm layers: with
    fewer norms, some matrix has none behind it that would undo the growth of its weights. The last
    linear layer, which never has one, counts only where it is alone."""
    hidden = len(matrices) - any(p.dim() == 2 for p in matrices)
    needed = max(hidden, 1) if matrices else 0
    return wanted == "fixed" or (wanted == "auto" and norms < needed)


def fixed_step_factor(bare: int) -> float:
    """Steps of fixed length shorten with the number of orthogonalized matrices that have no norm layer:
    the changes of L such layers add up as √L in the net's output."""
    return max(LEAST_STEP_FACTOR, math.sqrt(min(1.0, SHALLOW_MATRICES / max(bare, 1))))


def _muon_groups(
    settings: MuonSettings, momentum: float, groups: Sequence[dict[str, Any]], norms: int
) -> list[dict[str, Any]]:
    """Splits a group in two where only some of its tensors are orthogonalized."""
    least_dims = 3 if orthogonal_layers(settings.orthogonal, groups) == "filters" else 2
    matrices = [p for group in groups for p in split_matrices(group, least_dims)[0]]
    more: dict[str, Any] = {"adapt": True, "orthogonal": True}
    more["fixed_steps"] = has_fixed_steps(settings.steps, matrices, norms)
    # Momentum multiplies the rate of a LARS layer by 1 / (1 − m); this keeps the step sizes equal.
    eta = settings.trust_coefficient / (1 - momentum)
    if more["fixed_steps"] and settings.steps == "auto":
        more[STEP_FACTOR] = fixed_step_factor(len(matrices) - norms)
        eta *= more[STEP_FACTOR]
    made = []
    for group in groups:
        orthogonal, rest = split_matrices(group, least_dims)
        if orthogonal:
            made.append(group | {"params": orthogonal, "trust_coefficient": eta} | more)
        if rest or not orthogonal:
            adapted = group.get("role") != BIAS_NORM
            made.append(group | {"params": rest, "adapt": adapted, "orthogonal": False})
    return made
