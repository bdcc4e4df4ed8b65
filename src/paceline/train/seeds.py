"""Randomness of the training step.

In: (seed, step, micro-batch). Out: a seed for torch's generators. Dropout then depends on which
micro-batch of which step is computed, not on the rank that happens to compute it nor on anything
before it: a resumed run, and one on another number of ranks, draw the same numbers.
"""

from __future__ import annotations

import hashlib

import torch


def derive_seed(*parts: int | str) -> int:
    """63 bits that depend on every part."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_micro_batch(seed: int, step: int, number: int) -> None:
    """Seeds CPU and GPU generators for micro-batch `number` of `step`."""
    torch.manual_seed(derive_seed(seed, step, number))


def seed_initial_weights(seed: int) -> None:
    """Seeds the generators for drawing the initial weights."""
    torch.manual_seed(derive_seed(seed, "weights"))
