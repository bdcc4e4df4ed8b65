"""Combinations that are refused: settings of several sections, and settings with facts about the job.

Facts are those of `Job`, as in `job.device`, and the objects of the program, as in `program.augment`.
Rows of a single section are in its settings module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config.settings import EQUAL_SHARES
from paceline.core.exclusions import Exclusion, Test, above, not_in, one_of
from paceline.plan.fusion_plan import EIGHT_BIT

_ASYNCHRONOUS = {"comm.mode": one_of("asynchronous")}
_UNEQUAL = {"run.shares": not_in(EQUAL_SHARES)}
_REHEARSAL = {"rehearse.nodes": above(0)}
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


EXCLUSIONS: tuple[Exclusion, ...] = (
    # Asynchronous training.
    *_without(
        ("run.average_epochs", "run.noise_scale", "optim.schedule_free", "model.norm_group",
         "optim.clip_norm"),
        _ASYNCHRONOUS, "comm.mode = 'asynchronous'", "no rank sees the averaged gradient",
    ),
    *_without(("optim.batch_schedule", "run.shares"), _ASYNCHRONOUS, "comm.mode = 'asynchronous'"),
    Exclusion(
        "optim.name", lambda name: ":" in name, _ASYNCHRONOUS,
        "parameter servers cannot send the state of a class of another module",
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
        "optim.muon.share_products", one_of("on"), {**_ASYNCHRONOUS, "optim.name": one_of("muon")},
        "asynchronous ranks have different gradients", "use 'auto'",
    ),
    # Batch norms that compute over several ranks need a collective inside a pass.
    *(
        Exclusion(
            f"run.{name}", not_in("auto", "off"), {"model.norm_group": above(1)},
            "cannot be used with model.norm_group = {model.norm_group}",
            "use 'auto', or model.norm_group=1",
        )
        for name in ("fused_norm", "fused_convolutions", "compile", "cuda_graphs")
    ),
    Exclusion(
        "optim.scaling", one_of("auto"), {"program.optimizer": not_in(None)},
        "the rule does not know an optimizer given in Python",
        "name one of lars, muon, sgd, adamw and lamb, or use 'off'",
    ),
)  # fmt: skip
