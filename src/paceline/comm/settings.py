"""Settings of the communication module: the section `[comm]` of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, fields

from paceline.core.errors import ConfigError
from paceline.core.settings import SettingChecks
from paceline.plan.fusion_plan import ALL_TO_ALL, EIGHT_BIT, WIRES
from paceline.plan.schedules import algorithm_names

BACKENDS = ("auto", "gloo", "nccl")
OVERLAPS = ("auto", "on", "off")
MODES = ("synchronous", "asynchronous")
_OF_ASYNCHRONOUS = ("staleness", "servers")
# What a plan file decides itself.
_PLANNED = ("algorithm", "sizes", "eta_kib", "fusion_mib", "wire")
# By how much torch's own timeout is longer than `timeout_s`. The watchdog enforces `timeout_s`: it can
# say who is missing, and its clock does not count the time for which the process is stopped. The
# backend's clock counts it, so a shorter timeout here would end a job that was suspended as a whole.
BACKEND_GRACE_S = 7 * 86400.0


@dataclass(frozen=True)
class CommSettings:
    """How ranks connect and exchange gradients."""

    backend: str = "auto"
    """`nccl`, `gloo`, or `auto` (NCCL on GPUs, Gloo elsewhere)."""
    timeout_s: float = 600.0
    """Time limit of every collective, enforced by the watchdog."""
    rendezvous_timeout_s: float = 300.0
    """How long to wait for ranks that have not connected yet."""
    algorithm: str = "auto"
    """All-reduce algorithm: a name from docs/communication.md, `auto` (`native`, the backend's
    own), or `hybrid` (by message size)."""
    sizes: str = ""
    """File with the table size → algorithm for `hybrid`."""
    eta_kib: int | None = None
    """For `hybrid` without a table: `hierarchical` below this many KiB, `ring` from there on."""
    fusion_mib: float = 16.0
    """Size at which a gradient bucket is closed, in MiB; 0 sends every tensor separately."""
    wire: str = "auto"
    """Format in which gradients travel: `float32`, `float16`, `bfloat16`, the 8-bit formats `int8`,
    `float8_e4m3` and `float8_e5m2`, or `auto` (the gradients' own)."""
    error_feedback: bool = True
    """For 8-bit wire formats: add what rounding cut off to the gradients of the next step."""
    mode: str = "synchronous"
    """`synchronous`, or `asynchronous`: ranks push gradients to parameter servers and pull weights,
    without waiting for one another."""
    staleness: int = 4
    """Asynchronous mode: steps by which ranks may drift apart."""
    servers: int = 0
    """Asynchronous mode: the first ranks that serve a shard of the weights; 0 means all ranks."""
    group_size: int = 0
    """Ranks of a group in `hierarchical`, `torus2d` and `central`, whose groups have a server each; 0
    takes the ranks of a node."""
    overlap: str = "auto"
    """Send full buckets during backward: `on`, `off`, or `auto` (wherever that does not prevent
    CUDA graphs)."""
    plan: str = ""
    """`plan.toml` of `paceline tune` or `paceline plan`, which decides buckets, algorithms and wire
    formats."""
    share_gpus: bool = False
    """Allow several NCCL ranks on one GPU (needs NVIDIA MPS); for tests."""

    def __post_init__(self) -> None:
        check = SettingChecks("comm", self)
        check.known("backend", BACKENDS)
        check.known("algorithm", ("auto", "hybrid", *algorithm_names()))
        check.known("wire", WIRES)
        check.known("overlap", OVERLAPS)
        check.known("mode", MODES)
        for name in ("timeout_s", "rendezvous_timeout_s"):
            value = getattr(self, name)
            if not 1 <= value <= 86400:
                raise ConfigError(f"comm.{name}", value, "must be 1 to 86400 seconds", "try 600")
        if not 0 <= self.fusion_mib <= 65536:
            raise ConfigError("comm.fusion_mib", self.fusion_mib, "must be 0 to 65536", "try 16")
        if self.group_size < 0:
            raise ConfigError(
                "comm.group_size", self.group_size, "must be 0 (the ranks of a node) or more"
            )
        if self.eta_kib is not None and not 1 <= self.eta_kib <= 2**30:
            raise ConfigError("comm.eta_kib", self.eta_kib, "must be 1 or more", "try 1024")
        for name in _OF_ASYNCHRONOUS:
            if getattr(self, name) < 0:
                raise ConfigError(f"comm.{name}", getattr(self, name), "must be 0 or more")
        self._check_mode()
        self._check_together()

    def _check_mode(self) -> None:
        """Checks the settings of asynchronous training, which has no all-reduce."""
        if self.mode == "synchronous":
            for field in fields(self):
                value = getattr(self, field.name)
                if field.name in _OF_ASYNCHRONOUS and value != field.default:
                    raise ConfigError(
                        f"comm.{field.name}", value, "has no meaning with comm.mode = 'synchronous'",
                        "leave it out, or set comm.mode = 'asynchronous'",
                    )  # fmt: skip
            return
        for name, usual in (
            ("algorithm", "auto"), ("wire", "auto"), ("plan", ""), ("group_size", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value != usual:
                raise ConfigError(
                    f"comm.{name}", value,
                    "but comm.mode = 'asynchronous' has no all-reduce: gradients go to parameter servers",
                    "leave one of the two out",
                )  # fmt: skip
        if self.overlap == "on":
            raise ConfigError(
                "comm.overlap", "on", "comm.mode = 'asynchronous' pushes whole gradients, after backward",
                "use 'auto' or 'off'",
            )  # fmt: skip

    def _check_together(self) -> None:
        """Settings that contradict one another are refused: none is ignored in silence."""
        if self.plan:
            for field in fields(self):
                value = getattr(self, field.name)
                if field.name in _PLANNED and value != field.default:
                    raise ConfigError(
                        f"comm.{field.name}", value, f"but comm.plan = {self.plan!r} decides it",
                        "leave one of the two out",
                    )  # fmt: skip
            return
        if self.wire in EIGHT_BIT and self.algorithm != "auto":
            raise ConfigError(
                "comm.algorithm", self.algorithm, f"cannot sum {self.wire} numbers",
                f"leave it out: 8-bit formats travel by {ALL_TO_ALL}; or use comm.wire = 'float16'",
            )  # fmt: skip
        if not self.error_feedback and self.wire not in EIGHT_BIT:
            raise ConfigError(
                "comm.error_feedback", False, f"has no meaning with comm.wire = {self.wire!r}",
                f"it belongs to {', '.join(EIGHT_BIT)}",
            )  # fmt: skip
        if self.sizes and self.eta_kib is not None:
            raise ConfigError(
                "comm.eta_kib", self.eta_kib, f"but comm.sizes = {self.sizes!r} is a table already",
                "leave one of the two out",
            )  # fmt: skip
        if self.algorithm == "hybrid" and not self.sizes and self.eta_kib is None:
            raise ConfigError(
                "comm.algorithm", "hybrid", "needs a table of sizes",
                "give comm.sizes, a file that `paceline tune` writes, or comm.eta_kib",
            )  # fmt: skip
        given = self.sizes or self.eta_kib
        if self.algorithm != "hybrid" and given:
            raise ConfigError(
                "comm.sizes" if self.sizes else "comm.eta_kib", given,
                f"has no meaning with comm.algorithm = {self.algorithm!r}",
                "set comm.algorithm to 'hybrid'",
            )  # fmt: skip
