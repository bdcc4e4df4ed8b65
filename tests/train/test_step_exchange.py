"""One step over the communication module: overlapped buffers keep all that the flat exchange promises."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.gradient_exchange import GradientExchange
from paceline.comm.group import Group
from paceline.comm.settings import CommSettings
from paceline.core.errors import PacelineError
from paceline.core.topology import Topology
from paceline.train import exchange_parts
from paceline.train.step import StepOutcome, TrainStep
from ranks import run_ranks
from train.steps import CPU, OPTIM, Made, Net, alone, joined, make_step, same, snapshot, weights

# Every tensor alone: the most buffers, and the most that can leave early.
HYBRID = CommSettings(algorithm="hybrid", eta_kib=1, fusion_mib=0.0)
RING16 = CommSettings(algorithm="ring", wire="float16", fusion_mib=0.0)
NATIVE = CommSettings(fusion_mib=0.0)


def made(micro: int = 6, comm: CommSettings | None = HYBRID) -> Made:
    return Made(micro, comm=comm, optim=replace(OPTIM, weight_decay=0.1, decay_bias_norm=True))


def closed(step: TrainStep) -> Tensor:
    """The masters; the step's thread and groups are given back."""
    step.exchange.carrier.close()
    return weights(step)


class Odd(nn.Module):
    """A weight under two names, a frozen layer, one that nobody uses, and one that rank 1 uses."""

    def __init__(self, use: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.frozen = nn.Conv2d(1, 1, 1).requires_grad_(False)
        self.first, self.second = nn.Linear(144, 144), nn.Linear(144, 144)
        self.second.weight = self.first.weight
        self.norm, self.fc = nn.BatchNorm1d(144), nn.Linear(144, 4)
        self.spare, self.never, self.use = nn.Linear(4, 4), nn.Linear(3, 3), use

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(self.frozen(images).flatten(1)).relu()
        out: Tensor = self.fc(self.norm(self.second(hidden)))
        return out + self.spare(out) if self.use else out


def _odd(rank: int, micro: int, comm: CommSettings | None) -> tuple[Tensor, int]:
    with joined() as group:
        step = make_step(group, model=Odd(rank == 1), made=made(micro, comm))
        before = snapshot(step)
        assert not any(step.run(number, 0.1).skipped for number in range(2))
        assert step.exchange.overlaps == (comm is not None)
        after = snapshot(step)
        for name in ("frozen.weight", "never.weight", "never.bias"):
            assert torch.equal(before[f"model {name}"], after[f"model {name}"]), name
        assert not torch.equal(before["model spare.weight"], after["model spare.weight"])
        return closed(step), len(step.exchange.plan.buffers)


@pytest.mark.parametrize("micro", [6, 2])
def test_tied_frozen_and_unused_parameters_train_as_in_the_flat_exchange(micro: int) -> None:
    """With micro-batches of 2 a step has three of them, and only the last may send."""
    found = []
    for comm in (None, NATIVE, HYBRID, RING16):
        (ours, buffers), (theirs, _) = run_ranks(2, _odd, micro, comm)
        assert torch.equal(ours, theirs)
        # The weight with two names once, nothing of the frozen layer.
        assert buffers == (11 if comm else 1)
        found.append(ours)
    flat, native, hybrid, ring16 = found
    assert torch.equal(native, flat)  # two numbers have one sum
    torch.testing.assert_close(hybrid, flat, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ring16, flat, rtol=2e-3, atol=2e-3)
    assert not torch.equal(ring16, flat)


def _four(rank: int, comm: CommSettings | None) -> Tensor:
    with joined() as group:
        step = make_step(group, made=made(3, comm))
        for number in range(3):  # the last is too short for all ranks
            step.run(number, 0.1)
        return closed(step)


def test_four_ranks_end_bit_identical_by_every_way() -> None:
    flat = run_ranks(4, _four, None)[0]
    for comm in (HYBRID, RING16, replace(HYBRID, group_size=2)):
        results = run_ranks(4, _four, comm)
        assert all(torch.equal(found, results[0]) for found in results)
        torch.testing.assert_close(results[0], flat, rtol=2e-3, atol=2e-3)


def _poisoned(rank: int, comm: CommSettings) -> tuple[list[StepOutcome], bool, Tensor]:
    with joined() as group:
        step = make_step(group, made=made(comm=comm), norm=True)
        assert isinstance(step.model, Net)
        first = step.run(0, 0.1)
        before = snapshot(step)
        step.model.poison = float("nan") if rank == 1 else 0.0
        second = step.run(1, 0.1)
        kept = same(before, snapshot(step))
        step.model.poison = 0.0
        third = step.run(2, 0.1)
        return [first, second, third], kept, closed(step)


@pytest.mark.parametrize("comm", [HYBRID, RING16])
def test_a_nan_on_one_rank_skips_the_step_on_all(comm: CommSettings) -> None:
    results = run_ranks(2, _poisoned, comm)
    for outcomes, kept, trained in results:
        assert [outcome.skipped for outcome in outcomes] == [False, True, False]
        assert all(outcome.exposed_comm_s > 0 for outcome in outcomes)
        assert kept
        assert torch.equal(trained, results[0][2])


class Breaks(Net):
    """Its backward pass fails once the first buffers have left."""

    broken = False

    def forward(self, images: Tensor) -> Tensor:
        features = self.conv(images)
        if self.broken:
            features.register_hook(_break)
        out: Tensor = self.fc(features.relu().flatten(1))
        return out


def _break(gradient: Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def _broken(rank: int) -> tuple[str, bool, int]:
    with joined() as group:
        step = make_step(group, model=Breaks(), made=made())
        before = snapshot(step)
        step.model.broken = rank == 1  # type: ignore[assignment]
        sent: list[int] = []
        reduce = step.exchange.reduce

        def note(*values: object) -> None:
            sent.append(step.exchange.sent)
            reduce(*values)  # type: ignore[arg-type]

        step.exchange.reduce = note  # type: ignore[method-assign, assignment]
        with pytest.raises(PacelineError) as caught:
            step.run(0, 0.1)
        kept = same(before, snapshot(step))
        step.exchange.carrier.close()
        return str(caught.value), kept, sent[0]


def test_an_error_amid_backward_ends_the_step_on_all_ranks_alike() -> None:
    (text, kept, sent), (other, kept_there, sent_there) = run_ranks(2, _broken)
    assert text == other
    assert "rank 1: out of memory at step 1" in text
    assert kept
    assert kept_there
    assert (sent, sent_there) == (3, 2)


def _other_model(rank: int) -> str:
    with joined() as group, pytest.raises(PacelineError) as caught:
        make_step(group, model=Odd(False) if rank else Net(), made=made())
    return str(caught.value)


def test_ranks_with_other_parameters_are_told_alike() -> None:
    first, second = run_ranks(2, _other_model)
    assert first == second
    assert first.startswith("ranks differ in the trained parameters: '4 tensors of 1,644 elements")
    assert first.endswith("build the same model on every rank")


def _no_memory(rank: int, when: str) -> str:
    """Rank 1 has none, for the buffers or later on the communication thread."""

    def refuse(*values: object, **options: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    def run() -> None:
        with Group(Topology.from_env(os.environ), CommSettings(), CPU) as group:
            step = make_step(group, made=made(comm=RING16))
            with closing(step.exchange.carrier) as carrier:
                if rank == 1:
                    carrier._planned.staging.take = refuse  # type: ignore[attr-defined]
                step.run(0, 0.1)

    if rank == 1 and when == "build":
        exchange_parts.GradientExchange = refuse  # type: ignore[misc, assignment]
    try:
        with pytest.raises(PacelineError) as caught:
            run()
    finally:
        exchange_parts.GradientExchange = GradientExchange  # type: ignore[misc]
    return str(caught.value)


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("build", "out of memory with the gradients' buffers on cpu; free memory, or"),
        ("step", "out of memory in the exchange of gradients; free memory, or lower comm.fusion_m"),
    ],
)
def test_a_buffer_larger_than_memory_ends_all_ranks_with_one_line(when: str, words: str) -> None:
    for line in run_ranks(2, _no_memory, when):
        assert words in line


def test_a_process_alone_runs_what_it_is_asked_to() -> None:
    flat = make_step(alone(), made=made(comm=CommSettings()))
    asked = make_step(alone(), made=made(comm=HYBRID))
    for step in (flat, asked):
        for number in range(2):
            step.run(number, 0.1)
    assert len(flat.exchange.plan.buffers) == 1
    assert not flat.exchange.overlaps
    assert len(asked.exchange.plan.buffers) == 4
    assert asked.exchange.overlaps
    assert torch.equal(closed(asked), closed(flat))
