"""The names of the algorithms, without torch."""

from __future__ import annotations

from paceline.core.errors import ConfigError, nearest

ALGORITHMS = (
    "native",
    "ring",
    "hierarchical",
    "torus2d",
    "halving_doubling",
    "tree",
    "central",
)


def check_name(name: object, field: str = "comm.algorithm") -> None:
    if name not in ALGORITHMS:
        raise ConfigError(field, name, "unknown algorithm", nearest(str(name), ALGORITHMS))
