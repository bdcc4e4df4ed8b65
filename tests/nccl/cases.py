"""The cases of the NCCL suite: every pair of factors at least once.

A case is one value of every factor. `covering_cases` builds a list greedily, seeded, so that each pair
of values of two factors that may stand together occurs in some case.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from paceline.plan.schedules import algorithm_names

FACTORS: dict[str, tuple[Any, ...]] = {
    "algorithm": (*algorithm_names(), "hybrid"),
    "wire": ("auto", "float32", "float16", "bfloat16"),
    "overlap": ("on", "off"),
    "graphs": ("on", "off"),
    "accumulation": (1, 2),
    # A message for every tensor, a few of 64 KiB or more, one for all.
    "fusion_mib": (0.0, 0.0625, 16.0),
    # Of the last step: full; short on every rank; a single sample, so that most ranks have none.
    "last": ("full", "short", "one"),
    "dtype": ("fp32", "fp16"),
    # A parameter that no rank uses, or only rank 0; a non-finite gradient on the last rank at step 1.
    "special": ("none", "unused", "partial", "overflow"),
}
Case = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(case: Case) -> Iterator[Pair]:
    yield from itertools.combinations(sorted(case.items(), key=lambda item: item[0]), 2)


def all_pairs() -> set[Pair]:
    names = sorted(FACTORS)
    return {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
    }


def covering_cases(seed: int = 0, tries: int = 40) -> list[Case]:
    """Each case is the best of `tries` candidates, all of which hold a pair that is still open."""
    draw, left, cases = random.Random(seed), all_pairs(), []
    while left:
        best: tuple[int, Case] = (0, {})
        for _ in range(tries):
            open_pair = dict(draw.choice(sorted(left, key=repr)))
            case = {n: open_pair.get(n, draw.choice(values)) for n, values in FACTORS.items()}
            won = len(left.intersection(pairs_of(case)))
            best = max(best, (won, case), key=lambda found: found[0])
        cases.append(best[1])
        left.difference_update(pairs_of(best[1]))
    return cases


def describe(case: Case) -> str:
    return " ".join(f"{name}={value}" for name, value in case.items())
