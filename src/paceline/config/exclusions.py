"""Combinations that are refused: settings of several sections, and settings with facts about the job.

Facts are those of `Job`, as in `job.device`, and the objects of the program, as in `program.augment`.
Rows of a single section are in its settings module.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.settings import SYNCHRONOUS
from paceline.core.exclusions import Exclusion, above, not_in, one_of
from paceline.optim.settings import ANCHORED, OPTIMIZERS_OF_SVRG
from paceline.plan.fusion_plan import EIGHT_BIT

_ANCHORED = {"optim.name": one_of(*ANCHORED)}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is known about the job before the data is open.

    Attributes:
        processes: Number of processes.
        device: Type of their devices, `cpu` or `cuda`; empty if it is not known yet.
    """

    processes: int
    device: str = ""


def _fixed(name: str, allowed: object) -> Exclusion:
    """A row for a setting that makes gradients random."""
    return Exclusion(
        name, not_in(allowed), _ANCHORED,
        "{optim.name} needs the same gradient of a sample in every pass",
        f"use {name}={str(allowed).lower() if isinstance(allowed, bool) else allowed}",
    )  # fmt: skip


EXCLUSIONS: tuple[Exclusion, ...] = (
    # Averages and gradient noise.
    Exclusion(
        "run.average_epochs", not_in(0.0), {"optim.schedule_free": above(0)},
        "schedule-free training averages the weights itself", "use 0 with optim.schedule_free",
    ),
    Exclusion(
        "run.noise_scale", one_of(True), {"comm.wire": one_of(*EIGHT_BIT)},
        "comm.wire = {comm.wire!r} adds noise to the gradients", "leave one of the two out",
    ),
    # SVRG and its relatives.
    Exclusion(
        "precision.amp_dtype", not_in("auto", "fp32"), {"optim.name": one_of(*OPTIMIZERS_OF_SVRG)},
        "{optim.name} computes in fp32", "use --amp-dtype fp32",
    ),
    Exclusion(
        "precision.amp_dtype", one_of("auto"),
        {"optim.name": one_of(*OPTIMIZERS_OF_SVRG), "job.device": one_of("cuda")},
        "{optim.name} computes in fp32", "use --amp-dtype fp32",
    ),
    _fixed("data.augment", "none"),
    _fixed("data.flip", False),
    _fixed("data.cutout", 0),
    _fixed("data.color_jitter", (0.0, 0.0, 0.0, 0.0)),
    _fixed("run.mixup", 0.0),
    _fixed("run.cutmix", 0.0),
    Exclusion(
        "run.noise_scale", one_of(True), _ANCHORED,
        "{optim.name} exchanges differences of gradients, whose noise it would measure", "use false",
    ),
    Exclusion(
        "data.randaugment", lambda value: value[0] > 0, _ANCHORED,
        "{optim.name} needs the same gradient of a sample in every pass", "use [0, 9]",
    ),
    *(
        Exclusion(
            f"program.{name}", not_in(None), _ANCHORED,
            "{optim.name} needs the same gradient of a sample in every pass; an own augmentation may "
            "be random", "leave it out",
        )
        for name in ("augment", "device_augment")
    ),
    Exclusion(
        "comm.wire", one_of(*EIGHT_BIT), _ANCHORED,
        "{optim.name} exchanges differences and full gradients, between which error feedback would mix",
        "use 'auto'",
    ),
    Exclusion(
        "comm.wire", one_of("float16"), _ANCHORED,
        "{optim.name} exchanges full gradients: if one overflows, all steps up to the next are lost",
        "use 'auto' or 'bfloat16'",
    ),
    Exclusion(
        "run.strategy", not_in(SYNCHRONOUS), _ANCHORED,
        "{optim.name} has passes that only synchronous ranks make together", f"use {SYNCHRONOUS!r}",
    ),
    Exclusion(
        "optim.scaling", one_of("auto"), {"program.optimizer": not_in(None)},
        "the rule does not know an optimizer given in Python",
        "name one of lars, muon, sgd, adamw and lamb, or use 'off'",
    ),
)  # fmt: skip
