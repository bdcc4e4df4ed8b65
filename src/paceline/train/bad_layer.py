"""Where numbers stop being finite, found by looking.

In: a model whose loss is not finite. Out: the first weight, else the first layer's output, that is not.
Every rank holds the same weights and looks at the same noise, so all come to the same answer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.models.residual_block import fuse_norms
from paceline.precision.policy import Policy


def find_bad_layer(model: nn.Module, policy: Policy, images: tuple[int, ...]) -> str:
    """Words for the place, or nothing. `images` is the shape of a few images. Leaves running statistics
    changed: the run is over."""
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            return f"the weight {name} is not finite"
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):
                found.append(name)

        return hook

    leaves = [(name, m) for name, m in model.named_modules() if not list(m.children())]
    handles = [module.register_forward_hook(look(name)) for name, module in leaves]
    fuse_norms(model, False)  # only torch's own operators call hooks
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(images, generator=generator).to(policy.device, policy.dtype)
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), policy.compute():
            model(noise.contiguous(memory_format=torch.channels_last))
    finally:
        for handle in handles:
            handle.remove()
    return f"the output of {found[0]} is not finite" if found else ""
