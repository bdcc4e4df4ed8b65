"""Settings of the core's optimizers: the tables `[optim.lars]`, `[optim.muon]` and so on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.core.settings import SettingChecks
from paceline.optim.registry import ADAM, SGD, OptimizerSettings

ORTHOGONALS = ("filters", "all", "auto")
SHARES = ("auto", "on", "off")
STEPS = ("relative", "fixed", "auto")


@dataclass(frozen=True)
class SgdSettings(OptimizerSettings):
    """Properties of SGD, which has no further settings."""

    CREATE: ClassVar[str] = "optim.lars:create_sgd"
    RATES: ClassVar[str] = SGD
    HAS_KERNELS: ClassVar[bool] = True


@dataclass(frozen=True)
class LarsSettings(OptimizerSettings):
    """Settings of LARS."""

    CREATE: ClassVar[str] = "optim.lars:create_lars"
    RATES: ClassVar[str] = SGD
    HAS_KERNELS: ClassVar[bool] = True

    trust_coefficient: float = 0.001
    """Trust coefficient η, a factor of all trust ratios."""
    clip: bool = False
    """Limit the local learning rate to the global one, as in LARC."""

    def __post_init__(self) -> None:
        SettingChecks("optim.lars", self).number("trust_coefficient", "above 0", "try 0.001")


@dataclass(frozen=True)
class MuonSettings(OptimizerSettings):
    """Settings of Muon."""

    CREATE: ClassVar[str] = "optim.muon_groups:create_muon"
    PINNED: ClassVar[tuple[str, ...]] = ("orthogonal",)  # the momentum depends on it
    RATES: ClassVar[str] = SGD
    HAS_KERNELS: ClassVar[bool] = True

    trust_coefficient: float = 0.001
    """Trust coefficient η; steps are as long as those of LARS with the same η and momentum."""
    orthogonal: str = "filters"
    """Layers with orthogonalized momentum: `filters` (convolutions), `all` (linear layers too) or
    `auto` (`all` if hidden linear layers have more weights than convolutions)."""
    steps: str = "relative"
    """Step length of orthogonalized matrices: `relative` to their norm, `fixed` (relative to their
    initial norm), or `auto` (`fixed` if there are fewer norm layers than such matrices, not counting
    the last linear layer; shorter if many lack a norm layer).
    """
    share_products: str = "auto"
    """Divide the matrix products among ranks: `on`, `off`, or `auto` (with several ranks, unless they
    share a GPU or use Gloo on GPUs)."""

    def __post_init__(self) -> None:
        check = SettingChecks("optim.muon", self)
        check.number("trust_coefficient", "above 0", "try 0.001")
        check.known("orthogonal", ORTHOGONALS)
        check.known("steps", STEPS)
        check.known("share_products", SHARES)


@dataclass(frozen=True)
class AdamSettings(OptimizerSettings):
    """Settings of AdamW and LAMB."""

    TABLE: ClassVar[str] = "adam"
    RATES: ClassVar[str] = ADAM
    HAS_KERNELS: ClassVar[bool] = True

    beta1: float = 0.9
    """Decay rate of the average of gradients."""
    beta2: float = 0.999
    """Decay rate of the average of squared gradients."""
    eps: float = 1e-8
    """Constant added to the root of the average of squared gradients."""
    clip: bool = False
    """Limit the trust ratio of LAMB to 1."""

    def __post_init__(self) -> None:
        check = SettingChecks("optim.adam", self)
        for name in ("beta1", "beta2"):
            check.number(name, "in [0, 1)")
        check.number("eps", "0 or more")


@dataclass(frozen=True)
class AdamwSettings(AdamSettings):
    """Properties of AdamW."""

    CREATE: ClassVar[str] = "optim.adam:create_adamw"
    LR_BASE: ClassVar[float] = 2.5e-4  # from DeiT
    UNREAD: ClassVar[tuple[str, ...]] = ("clip",)


@dataclass(frozen=True)
class LambSettings(AdamSettings):
    """Properties of LAMB."""

    CREATE: ClassVar[str] = "optim.adam:create_lamb"
    LR_BASE: ClassVar[float] = 6.25e-4  # from "ResNet strikes back"
