from __future__ import annotations

import pytest

from paceline.core.errors import ConfigError
from paceline.plan.network import network


@pytest.mark.parametrize(
    "name", ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "alexnet", "alexnet_bn"]
)
def test_the_tensors_are_the_models_own(name: str) -> None:
    """Names, sizes and which stay fp32, as in training; the order is that of the forward pass."""
    import torch

    from paceline.models.registry import create_model
    from paceline.models.settings import ModelSettings
    from paceline.precision.policy import choose_policy
    from paceline.precision.settings import PrecisionSettings

    model = create_model(ModelSettings(name=name), num_classes=1000)
    choose_policy(PrecisionSettings(amp_dtype="bf16"), torch.device("cpu")).convert(model)
    wanted = {n: (p.numel(), p.dtype != torch.float32) for n, p in model.named_parameters()}
    found = network(name).tensors
    assert {t.name: (t.elements, t.half) for t in found} == wanted


def test_the_products_of_known_networks() -> None:
    """Published: 4.1 and 0.71 billion multiply-adds."""
    assert network("resnet50").flops == pytest.approx(2 * 4.1e9, rel=0.02)
    assert network("alexnet").flops == pytest.approx(2 * 0.71e9, rel=0.02)


def test_larger_images_cost_more() -> None:
    assert network("resnet50", 448).flops == pytest.approx(4 * network("resnet50").flops, rel=0.01)


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'resnet50'"):
        network("resnet5")
    with pytest.raises(ConfigError, match="image-size"):
        network("resnet50", 8)
