"""Parameter groups: biases and norms separately, each parameter once, also in unusual models."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from paceline.models import MODEL_NAMES, ModelSettings, create_model, named_roles, parameter_groups
from paceline.models.registry import count_norms


def ids(parameters: Iterable[nn.Parameter]) -> list[int]:
    return [id(p) for p in parameters]


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_exactly_the_matrices_of_our_models_decay(name: str) -> None:
    with torch.device("meta"):
        model = create_model(ModelSettings(name=name), num_classes=10)
    weights, rest = parameter_groups(model, 5e-5)
    assert (weights["role"], weights["weight_decay"]) == ("weight", 5e-5)
    assert (rest["role"], rest["weight_decay"]) == ("bias_norm", 0.0)
    assert ids(weights["params"]) == ids(p for p in model.parameters() if p.ndim > 1)
    assert ids(rest["params"]) == ids(p for p in model.parameters() if p.ndim == 1)


def test_norms_are_recognized_by_type_and_biases_by_name() -> None:
    norms = [
        *(nn.BatchNorm1d(4), nn.BatchNorm2d(4), nn.BatchNorm3d(4), nn.SyncBatchNorm(4)),
        *(nn.GroupNorm(2, 4), nn.LayerNorm([4, 4]), nn.RMSNorm(4)),
        *(nn.InstanceNorm1d(4, affine=True), nn.InstanceNorm2d(4, affine=True)),
    ]
    assert parameter_groups(nn.ReLU(), 0.1) == []
    (group,) = parameter_groups(nn.Sequential(*norms), 0.1)
    assert group["role"] == "bias_norm"
    assert len(group["params"]) == 2 * len(norms) - 1  # RMSNorm has no bias
    roles = named_roles(nn.ModuleList([nn.MultiheadAttention(4, 2), nn.LSTM(4, 4)]))
    biases = {"0.in_proj_bias", "0.out_proj.bias", "1.bias_ih_l0", "1.bias_hh_l0"}
    assert {name for name, role in roles.items() if role == "bias_norm"} == biases
    bare = nn.Module()
    bare.scale, bare.table = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(1, 3))
    assert named_roles(bare) == {"scale": "bias_norm", "table": "weight"}
    # As transformers of timm do.
    bare.no_weight_decay = lambda: {"table"}
    assert named_roles(bare)["table"] == "bias_norm"


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_the_nets_whose_filters_all_have_a_norm_are_the_resnets(name: str) -> None:
    """`optim.muon.steps = "auto"` depends on this."""
    with torch.device("meta"):
        model = create_model(ModelSettings(name=name), num_classes=10)
    filters = sum(p.ndim > 2 for p in model.parameters())
    assert (count_norms(model) >= filters) == ("resnet" in name or name == "alexnet_bn")


def test_frozen_batch_norms_do_not_count_as_norms() -> None:
    settings = ModelSettings(name="resnet18", freeze=("layer1",))
    with torch.device("meta"):
        frozen, whole = (
            create_model(s, num_classes=10) for s in (settings, ModelSettings("resnet18"))
        )
    assert count_norms(frozen) == count_norms(whole) - 4


def test_shared_parameters_count_once_as_weights() -> None:
    embed, out = nn.Embedding(5, 3), nn.Linear(3, 5)
    out.weight = embed.weight
    model = nn.ModuleDict({"embed": embed, "out": out})
    assert named_roles(model) == {"embed.weight": "weight", "out.bias": "bias_norm"}
    groups = parameter_groups(model, 0.1)
    assert [ids(group["params"]) for group in groups] == [ids([embed.weight]), ids([out.bias])]
    norm, linear = nn.LayerNorm([4, 4]), nn.Linear(4, 4)
    linear.weight = norm.weight
    assert named_roles(nn.ModuleDict({"norm": norm, "l": linear}))["norm.weight"] == "weight"
    twice = parameter_groups(nn.Sequential(linear, nn.ReLU(), linear), 0.1)
    assert [len(group["params"]) for group in twice] == [1, 1]


def test_frozen_parameters_have_a_role_but_no_group() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].requires_grad_(False)
    (group,) = parameter_groups(model, 0.1)
    assert ids(group["params"]) == ids(model[1].parameters())
    assert named_roles(model)["0.weight"] == "weight"
