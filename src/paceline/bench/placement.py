"""`Placement`: where the ranks of a benchmark run. Torch-free.

On hosts of an emulated cluster (--hosts, --ranks-per-host, --link-mbit), as processes of this host
(--ranks), or, without flags, as started by a launcher.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.core.topology import Topology


@dataclass(frozen=True)
class Placement:
    """`hosts` > 0: an emulated cluster; `ranks` > 0: this host; otherwise the launcher's ranks."""

    hosts: int = 0
    ranks_per_host: int = 1
    link_mbit: float = 0.0
    ranks: int = 0

    def __post_init__(self) -> None:
        for flag, value in (("--hosts", self.hosts), ("--ranks", self.ranks)):
            if value < 0:
                raise ConfigError(flag, value, "must be at least 1")
        if self.ranks_per_host < 1:
            raise ConfigError("--ranks-per-host", self.ranks_per_host, "must be at least 1")
        if self.link_mbit < 0:
            raise ConfigError("--link-mbit", self.link_mbit, "must be above 0", "try 200")
        if self.hosts and self.ranks:
            raise ConfigError(
                "--ranks", self.ranks, "cannot be given with --hosts", "use --ranks-per-host"
            )
        if self.ranks_per_host > 1 and not self.hosts:
            raise ConfigError(
                "--ranks-per-host", self.ranks_per_host, "needs --hosts", "or use --ranks"
            )

    @property
    def rate(self) -> str | None:
        """Rate of the links of an emulated cluster; None: unlimited."""
        return f"{self.link_mbit:g}mbit" if self.link_mbit else None

    def is_launched(self) -> bool:
        """Whether this process is a rank. Raises ConfigError if it is and the flags ask to start
        ranks, or if it is not and they do not."""
        topology = Topology.from_env(os.environ)
        launched = topology.launcher != "single"
        flag = "--hosts" if self.hosts else "--ranks"
        if launched and (self.hosts or self.ranks):
            raise ConfigError(
                flag,
                self.hosts or self.ranks,
                f"this process is a rank of a launcher already ({topology.launcher})",
                "leave the flag out under torchrun, srun and mpirun",
            )
        if not launched and not self.hosts and not self.ranks:
            raise ConfigError(
                "--ranks",
                None,
                "no ranks to measure between",
                "give --ranks 8, or --hosts 4 --ranks-per-host 4, or start with torchrun",
            )
        return launched
