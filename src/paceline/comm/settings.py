"""Settings of the communication: the section `[comm]` of a recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.core.errors import ConfigError
from paceline.core.exclusions import Exclusion, check_exclusions, not_in, one_of
from paceline.core.settings import Section, SettingChecks, settings_class, table_name
from paceline.plan.schedules import algorithm_names
from paceline.plan.wires import WIRES, own_algorithm, wire_format

BACKENDS = ("auto", "gloo", "nccl")
OVERLAPS = ("auto", "on", "off")
# Settings that must not be combined with `comm.plan`, because the plan file decides them.
_PLANNED = ("algorithm", "fusion_mib", "wire")
# Seconds by which torch's own timeout is longer than `timeout_s`. The watchdog enforces `timeout_s`: it
# can name the missing rank, and does not count the time during which the process is suspended. Torch
# counts this time, so a shorter timeout would end a job that was suspended as a whole.
BACKEND_GRACE_S = 7 * 86400.0


@dataclass(frozen=True)
class HybridSettings:
    """Settings of the algorithm `hybrid`."""

    sizes: str = ""
    """Algorithm by message size: a file, or a number N (`hierarchical` for buckets below N KiB, `ring`
    for larger ones).
    """

    def __post_init__(self) -> None:
        if self.eta_kib is not None and not 1 <= self.eta_kib <= 2**30:
            raise ConfigError("comm.hybrid.sizes", self.sizes, "must be 1 or more", "try 1024")

    @property
    def eta_kib(self) -> int | None:
        """Returns `sizes` as a number of KiB, or None if `sizes` is a file."""
        return int(self.sizes) if re.fullmatch("[0-9]{1,12}", self.sizes) else None

    EXCLUSIONS: ClassVar[tuple[Exclusion, ...]] = (
        Exclusion(
            "comm.algorithm", one_of("hybrid"), {"comm.hybrid.sizes": one_of("")},
            "needs to know which algorithm to use for which message size",
            "set comm.hybrid.sizes to a file that `paceline tune` has written, or to a number of KiB",
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class CommSettings(Section):
    """How ranks connect and exchange gradients."""

    NAME: ClassVar[str] = "comm"
    OWNERS: ClassVar[Mapping[str, str]] = {"hybrid": "comm.settings:HybridSettings"}
    CHOOSERS: ClassVar[tuple[str, ...]] = ("algorithm", "wire")

    backend: str = "auto"
    """`nccl`, `gloo`, or `auto` (NCCL on GPUs, Gloo elsewhere)."""
    timeout_s: float = 600.0
    """Time limit of every collective, enforced by the watchdog."""
    rendezvous_timeout_s: float = 300.0
    """How long to wait for ranks that have not connected yet."""
    algorithm: str = "auto"
    """All-reduce algorithm: a name from docs/distributed.md, `auto` (measured when a run starts; one
    node uses `native`, the backend's own), or `hybrid` (by message size)."""
    fusion_mib: float = 16.0
    """Size at which a gradient bucket is closed, in MiB; 0 sends every tensor separately. With the
    default, `algorithm = "auto"` may choose a smaller size."""
    wire: str = "auto"
    """Number format in which gradients are sent: `float32`, `float16`, `bfloat16`, `auto` (their
    dtype), or another format of docs/distributed.md.
    """
    group_size: int = 0
    """Ranks per group in `hierarchical`, `torus2d` and `central`; 0 makes each node a group."""
    overlap: str = "auto"
    """Send full buckets during backward: `on`, `off`, or `auto` (`on` unless it prevents CUDA
    graphs).
    """
    plan: str = ""
    """Plan file of `paceline tune` or `paceline plan`, with buckets, algorithms and wire formats."""
    min_ranks: int = 0
    """Continue without lost ranks while at least this number is left; 0 ends the job when a rank is
    lost.
    """
    share_gpus: bool = False
    """Allow several NCCL ranks on one GPU (needs NVIDIA MPS); for tests."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check = SettingChecks("comm", self)
        check.known("backend", BACKENDS)
        check.known("algorithm", ("auto", "hybrid", *algorithm_names()))
        wire_format(self.wire)
        check.known("overlap", OVERLAPS)
        for name in ("timeout_s", "rendezvous_timeout_s"):
            value = getattr(self, name)
            if not 1 <= value <= 86400:
                raise ConfigError(f"comm.{name}", value, "must be 1 to 86400 seconds", "try 600")
        if not 0 <= self.fusion_mib <= 65536:
            raise ConfigError("comm.fusion_mib", self.fusion_mib, "must be 0 to 65536", "try 16")
        if self.min_ranks < 0:
            raise ConfigError("comm.min_ranks", self.min_ranks, "must be 0 (off) or more")
        if self.group_size < 0:
            raise ConfigError(
                "comm.group_size", self.group_size, "must be 0 (each node is a group) or more"
            )
        check_exclusions((*EXCLUSIONS, *self.exclusions()), comm=self)

    def unused(self) -> list[str]:
        """Returns the subsections that are set although no setting chooses them.

        With `comm.plan`, the subsections of wire formats are never returned, because the plan file can
        choose any wire format.
        """
        unused = super().unused()
        if not self.plan or not unused:
            return unused
        kinds = {name: settings_class(CommSettings, name, "comm.plan") for name in WIRES.names()}
        planned = {table_name(kind, name) for name, kind in kinds.items()}
        return [name for name in unused if name not in planned]


EXCLUSIONS: tuple[Exclusion, ...] = (
    *(
        Exclusion(
            f"comm.{name}", not_in(getattr(CommSettings, name)), {"comm.plan": not_in("")},
            "conflicts with comm.plan = {comm.plan!r}, which decides it", "leave one of them out",
        )
        for name in _PLANNED
    ),
    Exclusion(
        "comm.algorithm", not_in("auto"), {"comm.wire": lambda wire: bool(own_algorithm(wire))},
        "cannot sum {comm.wire} gradients",
        "leave it out, because the format has its own all-reduce; or use comm.wire = 'float16'",
    ),
)  # fmt: skip
