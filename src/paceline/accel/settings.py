"""Settings of `paceline.accel`, the table `[run.accel]` of a recipe. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.core.exclusions import Exclusion, not_in, one_of
from paceline.core.settings import SettingChecks

SWITCHES = ("auto", "on", "off")
COMPILE_MODES = ("auto", "off", "model")
CUDNN = "cudnn"

_COMPILED = {"run.accel.compile": not_in("auto", "off")}
_COMPILED_BY = "cannot be compiled by run.accel.compile = {run.owned[accel].compile!r}"


@dataclass(frozen=True)
class AccelSettings:
    """Faster implementations of the model's layers in training; evaluation uses the plain model."""

    # These settings change the results of a step within rounding.
    EXACT: ClassVar[bool] = False
    # No other setting selects these.
    UNCHOSEN: ClassVar[bool] = True

    fused_norm: str = "auto"
    """Fused kernels for batch norm with ReLU, residual sum and pooling: `on`, `off`, or `auto` (on
    a GPU, for models that have them)."""
    fused_convolutions: str = "off"
    """1×1 convolutions fused with the batch norms around them, for ResNets with bottlenecks in half
    precision on a GPU: `on`, `off`, `auto` (if a timing at the first start shows that they are
    faster; stored in `~/.cache/paceline/products`), or `cudnn` (like `auto`, with kernels of cuDNN's
    graph API in fp16, also for other convolutions and for ResNets without bottlenecks; their sums have
    no fixed order, so repetitions agree only within rounding)."""
    recompute_norms: bool = False
    """Recompute outputs of batch norm and ReLU that convolutions read in the backward pass instead of
    storing them. Less memory, a slower step, the same bits unless convolutions are fused. For ResNets and
    `alexnet_bn`, without torch.compile."""
    compile: str = "auto"
    """torch.compile: `off`, `model`, or `auto` (`model` on a GPU for models without fused kernels).
    Batches of another size, such as the last one of a run, are not compiled."""

    EXCLUSIONS: ClassVar[tuple[Exclusion, ...]] = (
        Exclusion(
            "run.accel.fused_norm", one_of("on"), _COMPILED, _COMPILED_BY, "choose one of the two",
        ),
        Exclusion(
            "run.accel.fused_convolutions", one_of("on"), {"run.accel.fused_norm": one_of("off")},
            "needs run.accel.fused_norm", "choose one of the two",
        ),
        Exclusion(
            "run.accel.recompute_norms", one_of(True), _COMPILED, _COMPILED_BY,
            "choose one of the two",
        ),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check = SettingChecks("run.accel", self)
        check.known("fused_norm", SWITCHES)
        check.known("fused_convolutions", (*SWITCHES, CUDNN))
        check.known("compile", COMPILE_MODES)

    @property
    def allows_fused_norms(self) -> bool:
        return self.fused_norm != "off" and self.compile in ("auto", "off")
