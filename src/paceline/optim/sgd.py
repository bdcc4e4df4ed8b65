"""Momentum SGD in the mixed-precision engine of LARS.

In: parameters in fp32, fp16 or bf16. Out: `SGD`, LARS with every ratio at 1 and the rate outside the
momentum, which is torch's own rule.
"""

from __future__ import annotations

from torch.optim.optimizer import ParamsT

from paceline.optim.lars import LARS


class SGD(LARS):
    """v ← m·v + (g + βw); w ← w − lr·v. Masters, state and the device-side protocol are LARS's."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        fused: bool | None = None,
        in_half: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum,
            weight_decay,
            nesterov=nesterov,
            lr_in_momentum=False,
            adapt=False,
            fused=fused,
            in_half=in_half,
        )
