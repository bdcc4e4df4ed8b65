"""Declares the 8-bit wire formats, their cost and their settings. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from paceline.core.exclusions import Exclusion, one_of
from paceline.plan.cluster import Cluster
from paceline.plan.cost import Seconds
from paceline.plan.wires import Wire

ALL_TO_ALL = "all_to_all"
EIGHT_BIT = ("int8", "float8_e4m3", "float8_e5m2")
# Elements that share an fp32 scale.
BLOCK = 256
SCALE_BYTES = 4


def all_to_all_s(c: Cluster, m: Seconds) -> Seconds:
    """Returns the time of two all-to-alls, in which every rank sends a chunk to each other rank.

    Args:
        c: The cluster. The ranks of a node share its links.
        m: Size of the buffer, in the unit of `beta_s` and `gamma_s`.
    """
    p, link = c.ranks, c.slowest
    ranks_per_link = max(1.0, c.ranks_per_node / c.links) if c.nodes > 1 else 1.0
    sent = (p - 1) / p
    return 2 * (p - 1) * link.alpha_s + sent * m * (2 * ranks_per_link * link.beta_s + c.gamma_s)


# `casts` is the cost of quantizing an element to int8 on a CPU; fp8 takes two to five times as long there
# (records/alternatives).
_wire = partial(
    Wire, bits=8, block=BLOCK, block_bytes=SCALE_BYTES, algorithm=ALL_TO_ALL, cost=all_to_all_s,
    casts=8, create="alternatives.eight_bit.all_reduce:QuantizedAllReduce",
)  # fmt: skip
# `roundoff` is the relative rounding error of the largest value in a block.
INT8 = _wire("int8", roundoff=1 / 254)
FLOAT8_E4M3 = _wire("float8_e4m3", short="e4m3", roundoff=1 / 16)
FLOAT8_E5M2 = _wire("float8_e5m2", short="e5m2", roundoff=1 / 8)


@dataclass(frozen=True)
class EightBitSettings:
    """Settings of the 8-bit wire formats."""

    TABLE: ClassVar[str] = "eight_bit"

    error_feedback: bool = True
    """Add the residuals of quantization to the gradients of the next step."""

    EXCLUSIONS: ClassVar[tuple[Exclusion, ...]] = (
        Exclusion(
            "run.noise_scale", one_of(True), {"comm.wire": one_of(*EIGHT_BIT)},
            "comm.wire = {comm.wire!r} adds noise to the gradients", "leave one of the two out",
        ),
        Exclusion(
            "comm.wire", one_of(*EIGHT_BIT), {"run.strategy": one_of("rehearsal")},
            "cannot be rehearsed: each rank keeps its rounding errors", "use 'auto'",
        ),
    )  # fmt: skip
