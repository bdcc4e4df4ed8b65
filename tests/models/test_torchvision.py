"""Comparison with torchvision: equal outputs with the weights of either."""

import warnings

import pytest
import torch

from paceline.models.pretrained import load_pretrained
from paceline.models.registry import create_model
from paceline.models.settings import ModelSettings

with warnings.catch_warnings():
    # What torchvision says about missing image codecs is no concern of these tests.
    warnings.simplefilter("ignore")
    try:
        from torchvision import models as reference
    except (ImportError, RuntimeError) as problem:
        # A torchvision built for another torch raises RuntimeError on import.
        pytest.skip(f"torchvision cannot be imported: {problem}", allow_module_level=True)

NAMES = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "alexnet"]


def scrambled(model, seed):
    """Fills every tensor with moderate random values, so that each norm and bias has an effect."""
    generator = torch.Generator().manual_seed(seed)
    for key, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        if tensor.ndim > 1:
            fan_in = tensor[0].numel()
            tensor.normal_(0, fan_in**-0.5, generator=generator)
        elif key.endswith(("running_var", "weight")):
            tensor.uniform_(0.5, 1.5, generator=generator)
        else:
            tensor.uniform_(-0.5, 0.5, generator=generator)
    return model.eval()


def theirs(name):
    return getattr(reference, name)(weights=None)


def ours(name):
    return create_model(ModelSettings(name=name), num_classes=1000)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_equal_with_their_weights_in_our_model(name, tmp_path):
    right = scrambled(theirs(name), seed=1)
    torch.save(right.state_dict(), tmp_path / "theirs.pth")
    left = ours(name)
    count = len(left.state_dict())
    notes = load_pretrained(left, tmp_path / "theirs.pth")
    assert notes == [f"{count} of {count} tensors from theirs.pth"]
    compare_outputs(left.eval(), right)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_equal_with_our_weights_in_their_model(name):
    left = scrambled(ours(name), seed=2)
    right = theirs(name)
    right.load_state_dict(left.state_dict())
    compare_outputs(left, right.eval())


def compare_outputs(left, right):
    x = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        first, second = left(x), right(x)
    # Equal outputs mean little where the logits do not depend on the image.
    assert not torch.allclose(second[0], second[1], rtol=1e-3)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)
