"""Combinations that are refused: settings of several sections, and settings with facts about the job.

Facts are those of `Job`, as in `job.device`, and the objects of the program, as in `program.augment`.
Rows of a single section are in its settings module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config.settings import EQUAL_SHARES
from paceline.core.exclusions import Exclusion, Test, above, not_in, one_of
from paceline.optim.settings import ANCHORED, CYCLES, OPTIMIZERS_OF_SVRG
from paceline.plan.fusion_plan import EIGHT_BIT

_ASYNCHRONOUS = {"comm.mode": one_of("asynchronous")}
_UNEQUAL = {"run.shares": not_in(EQUAL_SHARES)}
_REHEARSAL = {"rehearse.nodes": above(0)}
_ANCHORED = {"optim.name": one_of(*ANCHORED)}
# The value that switches a setting off, and what it is called in messages.
_OFF = {
    "comm.mode": ("synchronous", "comm.mode = {comm.mode!r}"),
    "model.norm_group": (1, "model.norm_group"),
    "optim.batch_schedule": ("", "batch growth"),
    "optim.clip_norm": (0.0, "gradient clipping"),
    "optim.schedule_free": (0.0, "schedule-free training"),
    "run.average_epochs": (0.0, "averaging of weights"),
    "run.noise_scale": (False, "the noise scale"),
    "run.shares": (EQUAL_SHARES, "run.shares"),
    "run.trace": (False, "run.trace"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is known about the job before the data is open.

    Attributes:
        processes: Number of processes.
        device: Type of their devices, `cpu` or `cuda`; empty if it is not known yet.
    """

    processes: int
    device: str = ""


def _without(
    names: tuple[str, ...], when: Mapping[str, Test], mode: str, reason: str = ""
) -> list[Exclusion]:
    """Rows for settings that have to be off in a mode."""
    return [
        Exclusion(
            name, not_in(off), when, f"{title} is not supported with {mode}{reason and ': '}{reason}",
            f"use {name}={str(off).lower() if isinstance(off, bool) else off or repr(off)}",
        )
        for name in names
        for off, title in [_OFF[name]]
    ]  # fmt: skip


def _fixed(name: str, allowed: object) -> Exclusion:
    """A row for a setting that makes gradients random."""
    return Exclusion(
        name, not_in(allowed), _ANCHORED,
        "{optim.name} needs the same gradient of a sample in every pass",
        f"use {name}={str(allowed).lower() if isinstance(allowed, bool) else allowed}",
    )  # fmt: skip


EXCLUSIONS: tuple[Exclusion, ...] = (
    # Asynchronous training.
    *_without(
        ("run.average_epochs", "run.noise_scale", "optim.schedule_free", "model.norm_group",
         "optim.clip_norm"),
        _ASYNCHRONOUS, "comm.mode = 'asynchronous'", "no rank sees the averaged gradient",
    ),
    *_without(("optim.batch_schedule", "run.shares"), _ASYNCHRONOUS, "comm.mode = 'asynchronous'"),
    Exclusion(
        "optim.cycle_momentum", not_in(()), {**_ASYNCHRONOUS, "optim.schedule": one_of(*CYCLES)},
        "parameter servers use a constant momentum", "use []",
    ),
    Exclusion(
        "optim.name", lambda name: ":" in name, _ASYNCHRONOUS,
        "parameter servers cannot send the state of a class of another module",
        "use another optimizer, such as 'sgd'",
    ),
    Exclusion(
        "optim.name", one_of("rmsprop_warmup"), _ASYNCHRONOUS,
        "parameter servers do not know the epoch, which it needs",
        "use another optimizer, such as 'sgd'",
    ),
    Exclusion(
        "program.optimizer", not_in(None), _ASYNCHRONOUS,
        "comm.mode = 'asynchronous' cannot send the state of an optimizer given in Python",
        "name one in optim.name, as in 'sgd'",
    ),
    Exclusion(
        "precision.amp_dtype", one_of("fp16"), _ASYNCHRONOUS,
        "needs a loss scale that all ranks agree on in every step, and asynchronous ranks do not",
        "use --amp-dtype bf16 or fp32",
    ),
    Exclusion(
        "precision.amp_dtype", one_of("auto"), {**_ASYNCHRONOUS, "job.device": one_of("cuda")},
        "is fp16 on a GPU, which needs a loss scale that all ranks agree on in every step, and "
        "asynchronous ranks do not", "use --amp-dtype bf16 or fp32",
    ),
    # Averages and gradient noise.
    Exclusion(
        "run.average_epochs", not_in(0.0), {"optim.schedule_free": above(0)},
        "schedule-free training averages the weights itself", "use 0 with optim.schedule_free",
    ),
    Exclusion(
        "run.noise_scale", one_of(True), {"comm.wire": one_of(*EIGHT_BIT)},
        "comm.wire = {comm.wire!r} adds noise to the gradients", "leave one of the two out",
    ),
    # Unequal shares of the batch.
    *_without(("optim.batch_schedule", "model.norm_group", "run.noise_scale"), _UNEQUAL, "run.shares"),
    # Rehearsals.
    Exclusion(
        "rehearse.nodes", above(0), {"job.processes": above(1)},
        "a rehearsal runs in one process, and this job has {job.processes}",
        "start it without a launcher",
    ),
    *_without(
        ("comm.mode", "run.shares", "model.norm_group", "optim.batch_schedule", "run.trace"),
        _REHEARSAL, "a rehearsal",
    ),
    Exclusion(
        "comm.wire", one_of(*EIGHT_BIT), _REHEARSAL,
        "cannot be rehearsed: each rank keeps its rounding errors", "use 'auto'",
    ),
    Exclusion(
        "optim.name", one_of(*OPTIMIZERS_OF_SVRG), _REHEARSAL,
        "cannot be rehearsed: it passes over all samples", "use another optimizer",
    ),
    # Muon's shared products, SVRG and its relatives.
    Exclusion(
        "optim.share_products", one_of("on"), _ASYNCHRONOUS,
        "asynchronous ranks have different gradients", "use 'auto'",
    ),
    Exclusion(
        "comm.mode", one_of("asynchronous"), {"optim.name": one_of(*OPTIMIZERS_OF_SVRG)},
        "{optim.name} needs exact gradients of all ranks", "leave one of the two out",
    ),
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
        "run.shares", not_in(EQUAL_SHARES), _ANCHORED,
        "the full gradient of {optim.name} is divided equally", f"use {EQUAL_SHARES!r}",
    ),
    Exclusion(
        "model.norm_group", above(1), _ANCHORED,
        "{optim.name} has passes that ranks do not make together", "use 1",
    ),
    # Batch norms that compute over several ranks need a collective inside a pass.
    Exclusion(
        "run.cuda_graphs", not_in("auto", "off"), {"model.norm_group": above(1)},
        "cannot be used with model.norm_group = {model.norm_group}",
        "use 'auto', or model.norm_group=1",
    ),
    Exclusion(
        "optim.scaling", one_of("auto"), {"program.optimizer": not_in(None)},
        "the rule does not know an optimizer given in Python",
        "name one of lars, muon, sgd, adamw and lamb, or use 'off'",
    ),
)  # fmt: skip
