"""Parameter roles: biases and norms apart, each parameter once, on odd models too."""

import pytest
import torch
from torch import nn

from paceline.models.registry import create_model, named_roles, parameter_groups
from paceline.models.settings import MODEL_NAMES, ModelSettings


def ids(parameters):
    return [id(p) for p in parameters]


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_in_our_models_exactly_the_matrices_decay(name):
    with torch.device("meta"):
        model = create_model(ModelSettings(name=name), num_classes=10)
    weights, rest = parameter_groups(model, 5e-5)
    assert (weights["role"], weights["weight_decay"]) == ("weight", 5e-5)
    assert (rest["role"], rest["weight_decay"]) == ("bias_norm", 0.0)
    assert ids(weights["params"]) == ids(p for p in model.parameters() if p.ndim > 1)
    assert ids(rest["params"]) == ids(p for p in model.parameters() if p.ndim == 1)


def test_every_kind_of_norm_is_found_by_its_type():
    norms = [
        *(nn.BatchNorm1d(4), nn.BatchNorm2d(4), nn.BatchNorm3d(4), nn.SyncBatchNorm(4)),
        *(nn.GroupNorm(2, 4), nn.LayerNorm([4, 4]), nn.RMSNorm(4)),
        *(nn.InstanceNorm1d(4, affine=True), nn.InstanceNorm2d(4, affine=True)),
    ]
    groups = parameter_groups(nn.Sequential(*norms), 0.1)
    assert [group["role"] for group in groups] == ["bias_norm"]
    assert len(groups[0]["params"]) == 2 * len(norms) - 1  # RMSNorm has no bias


def test_a_model_without_bias_or_norm_has_one_group():
    groups = parameter_groups(nn.Linear(3, 2, bias=False), 0.1)
    assert [(group["role"], group["weight_decay"]) for group in groups] == [("weight", 0.1)]


def test_a_model_without_parameters_has_no_group():
    assert parameter_groups(nn.ReLU(), 0.1) == []


def test_a_shared_parameter_comes_once_under_its_first_name():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "out": nn.Linear(3, 5)})
    model["out"].weight = model["embed"].weight
    assert named_roles(model) == {"embed.weight": "weight", "out.bias": "bias_norm"}
    groups = parameter_groups(model, 0.1)
    assert [ids(group["params"]) for group in groups] == [
        [id(model["embed"].weight)],
        [id(model["out"].bias)],
    ]


def test_a_parameter_shared_by_norm_and_convolution_decays():
    model = nn.ModuleDict({"norm": nn.LayerNorm([4, 4]), "linear": nn.Linear(4, 4)})
    model["linear"].weight = model["norm"].weight
    assert named_roles(model)["norm.weight"] == "weight"


def test_a_module_used_twice_counts_once():
    layer = nn.Linear(2, 2)
    groups = parameter_groups(nn.Sequential(layer, nn.ReLU(), layer), 0.1)
    assert [len(group["params"]) for group in groups] == [1, 1]


def test_frozen_parameters_have_a_role_but_no_group():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].requires_grad_(False)
    groups = parameter_groups(model, 0.1)
    assert [group["role"] for group in groups] == ["bias_norm"]
    assert ids(groups[0]["params"]) == ids(model[1].parameters())
    assert named_roles(model)["0.weight"] == "weight"


def test_biases_of_attention_and_recurrence_are_biases():
    roles = named_roles(nn.ModuleList([nn.MultiheadAttention(4, 2), nn.LSTM(4, 4)]))
    assert roles["0.in_proj_bias"] == roles["0.out_proj.bias"] == "bias_norm"
    assert roles["1.bias_ih_l0"] == roles["1.bias_hh_l0"] == "bias_norm"
    assert roles["0.in_proj_weight"] == roles["1.weight_ih_l0"] == "weight"


def test_a_bare_parameter_of_the_model_itself_is_a_weight():
    model = nn.Module()
    model.scale = nn.Parameter(torch.ones(1))
    assert named_roles(model) == {"scale": "weight"}


def test_groups_are_what_an_optimizer_takes():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(parameter_groups(model, 0.5), lr=1.0)
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    model[0].bias.grad = torch.zeros_like(model[0].bias)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    torch.testing.assert_close(model[0].weight, before["0.weight"] * 0.5)
    assert torch.equal(model[0].bias, before["0.bias"])
