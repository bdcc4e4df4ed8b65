"""The error of a sum over p ranks in a wire format, measured in one process.

In: an algorithm's name, p, k and a format. Out: the sum with the algorithm's own order of additions and
roundings, its distance from the sum in fp64, and the bound that it must keep:

    |error| ≤ (r·u + p·2⁻²⁴)(1 + 1 %)·Σ|x|  +  r·tiny

with r the roundings to the wire format (unit roundoff u) on the longest way of a number, p·2⁻²⁴ for
the additions in fp32, and `tiny` the half step between the format's smallest numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.algorithms.names import check_name
from paceline.comm.wire import WireFormat


@dataclass(frozen=True)
class WireError:
    """Largest error of an element, and its bound, both as shares of Σ|x| of that element."""

    algorithm: str
    world_size: int
    wire: str
    worst: float
    bound: float
    finite: bool


def measure_error(
    algorithm: str,
    world_size: int,
    wire: WireFormat,
    *,
    k: int = 8,
    length: int = 256,
    seed: int = 0,
) -> WireError:
    """Sums normal numbers, equal on every machine, with the algorithm's order and roundings."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.randn(world_size, length, generator=generator)
    exact = shares.double().sum(0)
    size = shares.double().abs().sum(0)
    found = simulate_sum(algorithm, shares, wire, k)
    worst = ((found.double() - exact).abs() / size).max().item()
    roundings = count_roundings(algorithm, world_size, k)
    tiny = float(torch.finfo(wire.dtype).smallest_normal) * wire.unit_roundoff * 2.0**wire.shift
    relative = 1.01 * (roundings * wire.unit_roundoff + world_size * 2.0**-24)
    bound = relative + (world_size + roundings) * tiny / size.min().item()
    return WireError(
        algorithm, world_size, wire.name, worst, bound, bool(torch.isfinite(found).all())
    )


def simulate_sum(algorithm: str, shares: Tensor, wire: WireFormat, k: int = 8) -> Tensor:
    """What the ranks end with, in fp32, when each row of `shares` is one rank's buffer."""
    check_name(algorithm)
    sent = torch.empty(shares.shape, dtype=wire.dtype)
    wire.encode(shares, sent)
    if algorithm == "central":
        total = _at_once(sent)
    elif algorithm in ("hierarchical", "torus2d"):
        groups = [_at_once(sent[at : at + k]) for at in range(0, len(sent), k)]
        total = _in_line(torch.stack(groups))
    elif algorithm == "tree":
        total = _binomial(sent)
    elif algorithm == "halving_doubling":
        total = _halving(sent)
    else:  # ring; the backends' own all-reduce is one too, or rounds no more often
        total = _in_line(sent)
    result = torch.empty(total.shape)
    wire.decode(total, result)
    return result


def count_roundings(algorithm: str, world_size: int, k: int = 8) -> int:
    """Roundings to the wire format on the longest way, the first included."""
    check_name(algorithm)
    groups = -(-world_size // k)
    if algorithm == "central":
        return 2
    if algorithm in ("hierarchical", "torus2d"):
        return 1 + 1 + max(0, groups - 1)
    if algorithm in ("tree", "halving_doubling"):
        return 2 + (world_size - 1).bit_length()
    return max(1, world_size)


def _at_once(rows: Tensor) -> Tensor:
    """In fp32, rounded once: one rank has all the shares."""
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float()
    return total.to(rows.dtype)


def _in_line(rows: Tensor) -> Tensor:
    """Rounded at every hop: around a ring."""
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def _binomial(rows: Tensor) -> Tensor:
    """Every rank adds its children's sums to its own share in fp32, then rounds."""
    sums: list[Tensor | None] = [row.float() for row in rows]
    step = 1
    while step < len(sums):
        for at in range(0, len(sums) - step, 2 * step):
            below, own = sums[at + step], sums[at]
            assert below is not None
            assert own is not None
            sums[at] = own + below.to(rows.dtype).float()
            sums[at + step] = None
        step *= 2
    assert sums[0] is not None
    return sums[0].to(rows.dtype)


def _halving(rows: Tensor) -> Tensor:
    """What is kept stays in fp32, what is sent is rounded; the first extras fold beforehand."""
    core = 1 << (len(rows).bit_length() - 1)
    extra = len(rows) - core
    folded = [rows[2 * at + 1].float() + rows[2 * at].float() for at in range(extra)]
    sums = folded + [row.float() for row in rows[2 * extra :]]
    while len(sums) > 1:
        sums = [
            kept + given.to(rows.dtype).float()
            for kept, given in zip(sums[0::2], sums[1::2], strict=True)
        ]
    total: Tensor = sums[0].to(rows.dtype)
    return total
