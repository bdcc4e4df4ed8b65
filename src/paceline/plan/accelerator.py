"""`Accelerator`: what is known of a kind of GPU, from a catalogue with a source for each figure.

In: a name such as H100, in any case. Out: its peaks, its links inside a node, and how fast it was seen to
train ResNet-50. The catalogue is `accelerators.toml` beside this file.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from paceline.core.errors import ConfigError, nearest


@dataclass(frozen=True)
class Measured:
    """One whole training: images/s of one accelerator at `batch`, among `ranks` of one node."""

    images_per_s: float
    batch: int
    ranks: int
    source: str


@dataclass(frozen=True)
class Accelerator:
    """Peaks in FLOP/s and bytes/s; `measured` may be a sister chip's, then `like` names it."""

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    node_bytes_per_s: float
    source: str
    like: str = ""
    measured: Measured | None = None


@cache
def catalogue() -> dict[str, Accelerator]:
    text = files("paceline.plan").joinpath("accelerators.toml").read_text(encoding="utf-8")
    return {name: _read(name, table) for name, table in tomllib.loads(text).items()}


def _read(name: str, table: dict[str, Any]) -> Accelerator:
    measured = table.get("measured")
    return Accelerator(
        name=name,
        flops_per_s=table["tflops"] * 1e12,
        memory_bytes_per_s=table["memory_gb_per_s"] * 1e9,
        node_bytes_per_s=table["node_gb_per_s"] * 1e9,
        source=table["source"],
        like=table.get("like", ""),
        measured=None if measured is None else Measured(**measured),
    )


def accelerator(name: str) -> Accelerator:
    """ConfigError, with the nearest name, for one that is not in the catalogue."""
    known = catalogue()
    for key, found in known.items():
        if key.lower() == name.lower():
            return found
    raise ConfigError(
        "--gpu", name, "unknown accelerator",
        nearest(name.upper(), tuple(known)) or f"known are {', '.join(known)}; or give --profile",
    )  # fmt: skip
