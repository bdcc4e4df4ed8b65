from __future__ import annotations

import torch

from paceline.train.machine import derive_seed, seed_micro_batch


def test_seeds_depend_on_every_part_and_fit_torch() -> None:
    seeds = {derive_seed(a, b, c) for a in range(8) for b in range(8) for c in range(8)}
    assert len(seeds) == 512
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 23) != derive_seed(12, 3)


def test_a_micro_batch_draws_the_same_numbers_whatever_came_before() -> None:
    seed_micro_batch(7, 3, 1)
    first = torch.rand(4)
    torch.rand(100)
    seed_micro_batch(7, 3, 1)
    assert torch.equal(torch.rand(4), first)
    seed_micro_batch(7, 3, 2)
    assert not torch.equal(torch.rand(4), first)
