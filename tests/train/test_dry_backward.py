"""The trial that tells the order of gradients leaves no trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.core.errors import RunError
from paceline.train.dry_backward import DryBackward
from train.steps import Made, Net, alone, make_step, same, snapshot


def dry(step: object, forward: object = None, micro: int = 6) -> DryBackward:
    return DryBackward(
        forward or step.model, step.policy, step.normalize, step.batch_norm,  # type: ignore[attr-defined, arg-type]
        (micro, 12, 12, 1),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_statistics_weights_and_random_numbers_stay(dtype: str) -> None:
    step = make_step(alone(), made=Made(dtype=dtype), dropout=0.5, norm=True)
    step.run(0, 0.1)
    before, state = snapshot(step), torch.get_rng_state()
    shapes: list[tuple[int, ...]] = []

    def forward(images: Tensor) -> Tensor:
        shapes.append(tuple(images.shape))
        out: Tensor = step.model(images)
        return out

    dry(step, forward)()
    assert shapes == [(6, 1, 12, 12)]
    assert same(before, snapshot(step))
    assert torch.equal(state, torch.get_rng_state())
    gradients = [parameter.grad for parameter in step.model.parameters()]
    assert all(gradient is not None for gradient in gradients), "it went through all layers"


def test_it_fails_in_the_words_of_a_first_step() -> None:
    step = make_step(alone(), model=Net())

    def forward(images: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(RunError, match="out of memory at step 1 with a batch size of 6 a process"):
        dry(step, forward)()
    with pytest.raises(TypeError):
        dry(step, lambda: None)()
