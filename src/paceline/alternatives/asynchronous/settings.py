"""Settings of the strategy `asynchronous`: the table `[run.asynchronous]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.core.exclusions import Exclusion, not_in, one_of, switched_off
from paceline.core.settings import SettingChecks

_NO_ALL_REDUCE = "asynchronous training has no all-reduce: gradients go to parameter servers"
_NO_AVERAGE = "is not supported with asynchronous training: no rank sees the averaged gradient"
_NO_COMMON_SCALE = (
    "needs a loss scale that is equal on all ranks in every step, which asynchronous ranks lack"
)
_HALF = "use --amp-dtype bf16 or fp32"


@dataclass(frozen=True)
class AsynchronousSettings:
    """Asynchronous SGD: ranks push gradients to parameter servers and pull weights."""

    staleness: int = 4
    """Maximum number of steps between the fastest and the slowest rank."""
    servers: int = 0
    """Number of ranks, from rank 0 on, that update a part of the weights; 0 means all."""

    def __post_init__(self) -> None:
        check = SettingChecks("run.asynchronous", self)
        for name in ("staleness", "servers"):
            check.number(name, "0 or more")

    EXCLUSIONS: ClassVar[tuple[Exclusion, ...]] = (
        *switched_off(
            {"comm.algorithm": "auto", "comm.wire": "auto", "comm.plan": "", "comm.group_size": 0},
            _NO_ALL_REDUCE,
        ),
        *switched_off(
            {"run.average_epochs": 0.0, "run.noise_scale": False, "optim.clip_norm": 0.0},
            _NO_AVERAGE,
        ),
        *switched_off(
            {"optim.batch_schedule": ""}, "is not supported with asynchronous training"
        ),
        Exclusion(
            "comm.overlap", one_of("on"), {}, "asynchronous ranks push gradients after the backward pass",
            "use 'auto' or 'off'",
        ),
        Exclusion(
            "optim.name", lambda name: ":" in name, {},
            "parameter servers cannot send the state of a class of another module",
            "use another optimizer, such as 'sgd'",
        ),
        Exclusion(
            "optim.muon.share_products", one_of("on"), {"optim.name": one_of("muon")},
            "asynchronous ranks have different gradients", "use 'auto'",
        ),
        Exclusion(
            "program.optimizer", not_in(None), {},
            "parameter servers cannot send the state of an optimizer given in Python",
            "name one in optim.name, as in 'sgd'",
        ),
        Exclusion("precision.amp_dtype", one_of("fp16"), {}, _NO_COMMON_SCALE, _HALF),
        Exclusion(
            "precision.amp_dtype", one_of("auto"), {"job.device": one_of("cuda")},
            f"is fp16 on a GPU, which {_NO_COMMON_SCALE}", _HALF,
        ),
    )  # fmt: skip
