"""Settings of the communication module: the section `[comm]` of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ConfigError, nearest

BACKENDS = ("auto", "gloo", "nccl")


@dataclass(frozen=True)
class CommSettings:
    """How ranks meet and talk.

    `backend` is nccl, gloo, or auto, which takes NCCL where the ranks compute on GPUs and Gloo
    elsewhere. `timeout_s` bounds every collective, `rendezvous_timeout_s` the wait for ranks that have
    not arrived yet.
    """

    backend: str = "auto"
    timeout_s: float = 600.0
    rendezvous_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(
                "comm.backend", self.backend, "unknown", nearest(self.backend, BACKENDS)
            )
        for name in ("timeout_s", "rendezvous_timeout_s"):
            value = getattr(self, name)
            if not 1 <= value <= 86400:
                raise ConfigError(f"comm.{name}", value, "must be 1 to 86400 seconds", "try 600")
