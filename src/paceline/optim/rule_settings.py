"""Settings of Paceline's own optimizers: the tables `[optim.lars]`, `[optim.muon]` and so on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.optim.registry import ADAM, SGD, OptimizerSettings


@dataclass(frozen=True)
class SgdSettings(OptimizerSettings):
    """SGD has the shared settings only."""

    CREATE: ClassVar[str] = "optim.lars:create_sgd"
    RATES: ClassVar[str] = SGD
    HAS_KERNELS: ClassVar[bool] = True


@dataclass(frozen=True)
class LarsSettings(OptimizerSettings):
    """Settings of LARS."""

    CREATE: ClassVar[str] = "optim.lars:create_lars"
    RATES: ClassVar[str] = SGD
    HAS_KERNELS: ClassVar[bool] = True


@dataclass(frozen=True)
class MuonSettings(OptimizerSettings):
    """Settings of Muon."""

    CREATE: ClassVar[str] = "optim.muon_groups:create_muon"
    RATES: ClassVar[str] = SGD
    HAS_KERNELS: ClassVar[bool] = True


@dataclass(frozen=True)
class AdamwSettings(OptimizerSettings):
    """Settings of AdamW."""

    CREATE: ClassVar[str] = "optim.adam:create_adamw"
    RATES: ClassVar[str] = ADAM
    LR_BASE: ClassVar[float] = 2.5e-4  # DeiT's
    HAS_KERNELS: ClassVar[bool] = True


@dataclass(frozen=True)
class LambSettings(OptimizerSettings):
    """Settings of LAMB."""

    CREATE: ClassVar[str] = "optim.adam:create_lamb"
    RATES: ClassVar[str] = ADAM
    LR_BASE: ClassVar[float] = 6.25e-4  # of "ResNet strikes back"
    HAS_KERNELS: ClassVar[bool] = True
