"""Numeric contract 5 and all else that one rank may meet: every rank skips, stops or fails alike."""

from __future__ import annotations

import math
import os
import signal
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import CommSettings, Group, Signals
from paceline.comm.settings import HybridSettings
from paceline.core.errors import PacelineError
from paceline.core.topology import Topology
from paceline.optim.rule_settings import MuonSettings
from paceline.precision.settings import PrecisionSettings
from paceline.train.step import StepOutcome
from ranks import run_ranks
from train.steps import CPU, OPTIM, Made, Net, joined, make_step, same, snapshot, weights

HYBRID = CommSettings(algorithm="hybrid", owned={"hybrid": HybridSettings("1")}, fusion_mib=0.0)
RING16 = CommSettings(algorithm="ring", wire="float16", fusion_mib=0.0)
SCALE = PrecisionSettings(loss_scale_init=1024.0)
MUON = replace(OPTIM, name="muon", owned={"muon": MuonSettings(trust_coefficient=0.05)})


def _poisoned(
    rank: int, made: Made, value: float
) -> tuple[list[StepOutcome], bool, list[float], Tensor]:
    """Rank 1's gradients are not finite in the second of three steps."""
    with joined() as group:
        step = make_step(group, made=made, norm=True)
        model = step.model
        assert isinstance(model, Net)
        outcomes, scales = [step.run(0, 0.1)], [float(step.scale.value)]
        before = snapshot(step)
        model.poison = value if rank == 1 else 0.0
        outcomes.append(step.run(1, 0.1))
        kept = same(before, snapshot(step))
        scales.append(float(step.scale.value))
        model.poison = 0.0
        outcomes.append(step.run(2, 0.1))
        scales.append(float(step.scale.value))
        step.exchange.close()
        return outcomes, kept, scales, weights(step)


@pytest.mark.parametrize(
    ("made", "value"),
    [
        (Made(6), math.nan),
        (Made(6), math.inf),
        (Made(6, comm=HYBRID), math.nan),
        (Made(6, comm=RING16), math.nan),
        # The gradients leave fp16's range; the loss stays an ordinary number.
        (Made(3, dtype="fp16", precision=SCALE), 5000.0),
        (Made(6, dtype="fp16", precision=SCALE), 5000.0),
        (Made(6, optim=MUON), math.inf),
        (Made(6, dtype="fp16", precision=SCALE, optim=MUON), 5000.0),
    ],
    ids=["nan", "inf", "hybrid", "fp16 wire", "fp16, accumulated", "fp16", "muon", "muon in fp16"],
)
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(
    made: Made, value: float
) -> None:
    results = run_ranks(2, _poisoned, made, value)
    for outcomes, kept, scales, trained in results:
        assert [outcome.skipped for outcome in outcomes] == [False, True, False]
        assert all(outcome.done for outcome in outcomes)
        assert kept
        assert trained.isfinite().all()
        assert torch.equal(trained, results[0][3])
        if made.dtype == "fp16":
            assert all(math.isfinite(outcome.loss) for outcome in outcomes)
            assert [outcome.loss_scale for outcome in outcomes] == [1024.0, 1024.0, 512.0]
            assert scales == [1024.0, 512.0, 512.0]


def _signalled(rank: int, when: str) -> tuple[bool, str, bool]:
    with joined() as group:
        step = make_step(group, 3, norm=True)
        before = snapshot(step)
        if rank == 1 and when == "at the start":
            step.stop.received = signal.SIGTERM
        elif rank == 1 and when == "between micro-batches":
            compute = step.micro.run

            def last(*batch: Tensor, **how: Any) -> None:
                compute(*batch, **how)
                step.stop.received = signal.SIGTERM

            step.micro.run = last  # type: ignore[assignment, method-assign]
        elif rank == 1:  # after the last micro-batch of the step, before the exchange
            exchange = step.exchange.reduce

            def late(loss: Tensor, signals: Signals) -> None:
                step.stop.received = signal.SIGINT
                exchange(loss, replace(signals, interrupt=1.0))

            step.exchange.reduce = late  # type: ignore[method-assign]
        outcome = step.run(0, 0.1)
        return outcome.done, outcome.stop.name, same(before, snapshot(step))


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ("at the start", (False, "SIGTERM", True)),
        ("between micro-batches", (False, "SIGTERM", True)),
        ("after the work", (True, "SIGINT", False)),
    ],
)
def test_a_signal_on_one_rank_abandons_the_step_on_all_unless_its_work_is_done(
    when: str, expected: tuple[bool, str, bool]
) -> None:
    assert run_ranks(2, _signalled, when) == [expected] * 2


def _halted(rank: int, early: bool) -> tuple[list[bool], bool]:
    """Rank 1 is asked to stop in step 1. `early`: rank 0 hears of it while it works on step 0."""
    with joined() as group:
        step = make_step(group, 6, norm=True)
        assert step.plan.micro_batches(2, 1) == [], "the short step 2 has nothing to give up"
        before = snapshot(step)
        group._stop_heard = early and rank == 0
        done = [step.run(0, 0.1).done]
        if not early:
            before = snapshot(step)
        if rank == 1:
            step.stop.received = signal.SIGTERM
        done += [step.run(number, 0.1).done for number in (1, 2)]
        return done, same(before, snapshot(step))


@pytest.mark.parametrize("early", [True, False])
def test_weights_halt_with_the_first_rank_that_gives_up_and_for_good(early: bool) -> None:
    assert run_ranks(2, _halted, early) == [([not early, False, False], True)] * 2


class Breaks(Net):
    """Its forward pass fails, or its backward pass once the first buckets have been sent."""

    breaks = ""

    def forward(self, images: Tensor) -> Tensor:
        if self.breaks == "forward":
            _break(images)
        features = self.norm(self.conv(images))
        if self.breaks == "backward":
            features.register_hook(_break)
        return self.fc(features.relu().flatten(1))


def _break(tensor: Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def _faulty(rank: int, kind: str) -> tuple[str, bool, int]:
    with joined() as group:
        step = make_step(group, model=Breaks(norm=True), made=Made(6, comm=HYBRID))
        before, sent = snapshot(step), []
        if rank == 1 and kind == "between steps":
            step.fault = PacelineError("the disk is full", "free some")
        elif rank == 1:
            step.model.breaks = kind  # type: ignore[assignment]
        reduce = step.exchange.reduce

        def note(*values: object) -> None:
            sent.append(step.exchange.sent)
            reduce(*values)  # type: ignore[arg-type]

        step.exchange.reduce = note  # type: ignore[method-assign, assignment]
        with pytest.raises(PacelineError) as caught:
            step.run(0, 0.1)
        step.exchange.close()
        return str(caught.value), same(before, snapshot(step)), sent[0]


@pytest.mark.parametrize(
    ("kind", "message", "sent"),
    [
        ("between steps", "rank 1: the disk is full; free some", [5, 0]),
        ("forward", "rank 1: out of memory at step 1 with a batch size of 6", [5, 0]),
        ("backward", "rank 1: out of memory at step 1 with a batch size of 6", [5, 2]),
    ],
)
def test_an_error_on_one_rank_ends_the_step_on_all(
    kind: str, message: str, sent: list[int]
) -> None:
    """Also where some buckets have been sent: the others wait for the rest."""
    results = run_ranks(2, _faulty, kind)
    assert results[0][0] == results[1][0]
    assert message in results[0][0]
    assert all(kept for _, kept, _ in results)
    assert [found for *_, found in results] == sent


def _no_memory(rank: int) -> str:
    """Rank 1 finds none on the communication thread."""

    def refuse(*values: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    def run() -> None:
        with Group(Topology.from_env(os.environ), CommSettings(), CPU) as group:
            step = make_step(group, made=Made(6, comm=RING16))
            with closing(step.exchange):
                if rank == 1:
                    step.exchange.transport.planned.carry = refuse  # type: ignore[attr-defined]
                step.run(0, 0.1)

    with pytest.raises(PacelineError) as caught:
        run()
    return str(caught.value)


def test_memory_that_runs_out_in_the_exchange_ends_all_ranks_with_one_line() -> None:
    for line in run_ranks(2, _no_memory):
        assert (
            "out of memory in the exchange of gradients; free memory, or lower comm.fusion" in line
        )


class Sparse(nn.Module):
    """Its table has gradients for the rows that were looked up, and no others."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.table = Net(norm=True), nn.Embedding(5, 4, sparse=sparse)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.body(images)
        return logits + self.table(torch.zeros(len(images), dtype=torch.int64))


def _sparse(rank: int, everywhere: bool) -> tuple[str, bool]:
    with joined() as group:
        made = Made(6, dtype="fp16", precision=SCALE)
        step = make_step(group, model=Sparse(everywhere or rank == 1), made=made)
        before = snapshot(step)
        with pytest.raises(PacelineError) as caught:
            step.run(0, 0.1)
        return str(caught.value), same(before, snapshot(step))


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_sparse_gradient_is_refused_by_name_on_all_ranks(everywhere: bool) -> None:
    results = run_ranks(2, _sparse, everywhere)
    assert results[0] == results[1]
    line, kept = results[0]
    assert kept
    assert line.endswith(
        "the gradient of table.weight is sparse; make it dense, as with nn.Embedding(sparse=False)"
    )
