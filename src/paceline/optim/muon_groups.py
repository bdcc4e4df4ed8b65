"""Creates Muon from the settings: chooses the orthogonalized tensors and the length of their steps."""

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

# Steps of fixed length become shorter in nets with more than this number of orthogonalized matrices
# without a norm layer. Smaller factors have not been tried.
SHALLOW_MATRICES, LEAST_STEP_FACTOR = 4, 0.5


def create_muon(
    settings: OptimSettings, groups: Sequence[dict[str, Any]], lr: float, context: Context
) -> Muon:
    """Creates Muon from the settings; see `OptimizerSettings.CREATE`."""
    own = settings.of("muon", MuonSettings)
    return Muon(
        _muon_groups(own, settings.momentum, groups, context.norms),
        lr,
        settings.momentum,
        nesterov=settings.nesterov,
        trust_coefficient=own.trust_coefficient,
        fused=context.fused,
    )


def _orthogonal_layers(wanted: str, groups: Sequence[dict[str, Any]]) -> str:
    """Returns the value of `optim.muon.orthogonal`, with `auto` replaced by `all` or `filters`.

    `auto` means `all` if linear layers have at least as many weights as convolutions, as in
    perceptrons, transformers and ConvNeXt, otherwise `filters`. The last linear layer, the classifier,
    does not count, because it is large in every network with many classes.
    """
    if wanted != "auto":
        return wanted
    matrices = [p for group in groups for p in split_matrices(group, 2)[0]]
    linear = [p.numel() for p in matrices if p.dim() == 2][:-1]
    filters = [p.numel() for p in matrices if p.dim() > 2]
    return "all" if sum(linear) >= sum(filters) else "filters"


def _has_fixed_steps(wanted: str, matrices: Sequence[Tensor], norms: int) -> bool:
    """Returns True if `optim.muon.steps` means steps of a fixed length, independent of weight norms.

    With `auto`, this is the case if the network has fewer norm layers than orthogonalized matrices:
    then some matrix is not followed by a norm layer, and its growth is not limited. One linear layer,
    the classifier, does not count, unless it is the only matrix.
    """
    hidden = len(matrices) - any(p.dim() == 2 for p in matrices)
    needed = max(hidden, 1) if matrices else 0
    return wanted == "fixed" or (wanted == "auto" and norms < needed)


def fixed_step_factor(bare: int) -> float:
    """Returns a factor, at most 1, for the length of steps with `fixed_steps` (see `Muon`).

    The output changes of L layers without a norm layer add up to √L times the change of one layer.

    Args:
        bare: Number of orthogonalized matrices without a norm layer.
    """
    return max(LEAST_STEP_FACTOR, math.sqrt(min(1.0, SHALLOW_MATRICES / max(bare, 1))))


def _muon_groups(
    settings: MuonSettings, momentum: float, groups: Sequence[dict[str, Any]], norms: int
) -> list[dict[str, Any]]:
    """Splits parameter groups into groups of orthogonalized tensors and groups of all other tensors."""
    least_dims = 3 if _orthogonal_layers(settings.orthogonal, groups) == "filters" else 2
    matrices = [p for group in groups for p in split_matrices(group, least_dims)[0]]
    fixed = _has_fixed_steps(settings.steps, matrices, norms)
    # In LARS, momentum multiplies the rate by 1 / (1 − m), but not in Muon; this η makes steps equal.
    eta = settings.trust_coefficient / (1 - momentum)
    more: dict[str, Any] = {"adapt": True, "orthogonal": True, "fixed_steps": fixed}
    if fixed and settings.steps == "auto":
        more[STEP_FACTOR] = fixed_step_factor(len(matrices) - norms)
        eta *= more[STEP_FACTOR]
    split = []
    for group in groups:
        orthogonal, rest = split_matrices(group, least_dims)
        if orthogonal:
            split.append(group | {"params": orthogonal, "trust_coefficient": eta} | more)
        if rest or not orthogonal:
            adapted = group.get("role") != BIAS_NORM
            split.append(group | {"params": rest, "adapt": adapted, "orthogonal": False})
    return split
