"""What part each parameter plays, and the optimizer groups that follow from it.

In: any `nn.Module`. Out: parameter groups that torch's optimizers take. Weight decay pulls towards
zero, which regularises the weights of convolutions and linear layers; biases and the scales and
shifts of normalisation gain nothing from it, and at large batches it costs them accuracy.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

WEIGHT = "weight"
BIAS_NORM = "bias_norm"

# `_NormBase` is the root of every BatchNorm, SyncBatchNorm and InstanceNorm.
_NORM_TYPES = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def _owned(model: nn.Module) -> dict[int, tuple[str, nn.Parameter, str]]:
    """Each parameter once, in the order of the model: its first name, itself, its role.

    A parameter shared by two modules is a weight if one of them uses it as a weight: what a
    convolution multiplies with must decay even where a norm borrows it.
    """
    found: dict[int, tuple[str, nn.Parameter, str]] = {}
    for path, module in model.named_modules():
        is_norm = isinstance(module, _NORM_TYPES)
        for own_name, parameter in module.named_parameters(recurse=False):
            # Attention says "in_proj_bias", recurrent layers "bias_hh_l0".
            is_bias = own_name.startswith("bias") or own_name.endswith("_bias")
            role = BIAS_NORM if is_norm or is_bias else WEIGHT
            name = f"{path}.{own_name}" if path else own_name
            if id(parameter) in found:
                name, _, earlier = found[id(parameter)]
                role = WEIGHT if WEIGHT in (role, earlier) else BIAS_NORM
            found[id(parameter)] = (name, parameter, role)
    return found


def named_roles(model: nn.Module) -> dict[str, str]:
    """Parameter name → `weight` or `bias_norm`, frozen parameters included, shared ones once."""
    return {name: role for name, _, role in _owned(model).values()}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """At most two groups: `weight` with `weight_decay`, then `bias_norm` with none.

    Frozen parameters are left out, and so is a group that would be empty.
    """
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": weight_decay, "role": WEIGHT},
        {"params": [], "weight_decay": 0.0, "role": BIAS_NORM},
    ]
    for _, parameter, role in _owned(model).values():
        if parameter.requires_grad:
            groups[0 if role == WEIGHT else 1]["params"].append(parameter)
    return [group for group in groups if group["params"]]
