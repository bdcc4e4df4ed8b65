"""The communication thread as a carrier: what it tells on the way, and how it fails."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comm.exchanges import CPU, agreed, alone, joined
from paceline.comm.agreement import PeerError
from paceline.comm.create_carrier import create_carrier
from paceline.comm.exchange_observer import NoObserver, Observers
from paceline.comm.gradient_exchange import GradientExchange
from paceline.comm.group import Group
from paceline.comm.settings import CommSettings
from paceline.core.errors import RunError
from paceline.core.topology import Topology
from paceline.plan import FusionBuffer, FusionPlan
from ranks import run_ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


PLAN = FusionPlan(
    (
        FusionBuffer(("4.bias", "4.weight"), "ring"),
        FusionBuffer(("2.bias", "2.weight"), "hierarchical", "float16"),
        FusionBuffer(("0.bias", "0.weight"), "native"),
    )
)


class Log:
    """What an observer is told, and on which thread."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.threads: set[str] = set()

    def step_begun(self, step: int) -> None:
        self.lines.append(f"step {step}")

    def sent(self, buffer: int) -> None:
        self.lines.append(f"sent {buffer}")

    def begun(self, buffer: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.lines.append(f"begun {buffer}")

    def ended(self, buffer: int) -> None:
        self.lines.append(f"ended {buffer}")

    def step_ended(self, exposed_s: float) -> None:
        self.lines.append("over" if exposed_s > 0 else "no time")


def exchange_of(model: nn.Module, group: Group, **options: Any) -> GradientExchange:
    carrier = create_carrier(group, CommSettings(timeout_s=20), PLAN)
    return GradientExchange(model.named_parameters(), group, PLAN, carrier=carrier, **options)


def step(exchange: GradientExchange, model: nn.Module, number: int, *, arm: bool = True) -> None:
    exchange.begin(number)
    if arm:
        exchange.arm()
    model(torch.ones(2, 3)).sum().backward()
    exchange.gather()
    agreed(exchange)


def _observed(rank: int) -> tuple[list[str], set[str]]:
    with joined() as group:
        model, log = net(), Log()
        exchange = exchange_of(model, group)
        exchange.observer = Observers([NoObserver(), log])
        step(exchange, model, 7)
        exchange.carrier.close()
        assert exchange.exposed_s == exchange.exposed() > 0
        return log.lines, log.threads


def test_an_observer_is_told_of_every_buffer_in_order() -> None:
    for lines, threads in run_ranks(2, _observed):
        assert (lines[0], lines[-1]) == ("step 7", "over")
        assert threads == {"paceline-comm"}
        for word in ("sent", "begun", "ended"):
            assert [line for line in lines if word in line] == [f"{word} {n}" for n in range(3)]
        for number in range(3):
            order = [lines.index(f"{word} {number}") for word in ("sent", "begun", "ended")]
            assert order == sorted(order)
        # One thread carries all: a buffer begins when the one before has ended.
        assert lines.index("begun 1") > lines.index("ended 0")


def test_a_second_gradient_after_the_buffer_left_is_not_lost_in_silence() -> None:
    model = net()
    exchange = exchange_of(model, alone())
    exchange.begin()
    exchange.arm()
    model(torch.ones(2, 3)).sum().backward()
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RunError, match="gave 4.* a second gradient .* use --set comm.overlap=off"):
        exchange.gather()
    exchange.carrier.close()


def test_without_overlap_nothing_hangs_on_the_parameters() -> None:
    model = net()
    exchange = exchange_of(model, alone(), overlap=False)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    step(exchange, model, 0)
    assert exchange.sent == 3
    exchange.carrier.close()


def _peer_fails(rank: int) -> str:
    """Rank 1 fails between two exchanges; rank 0 waits in the first buffer of the second."""

    def run() -> None:
        with Group(Topology.from_env(os.environ), CommSettings(timeout_s=20), CPU) as group:
            model = net()
            exchange = exchange_of(model, group)
            step(exchange, model, 0)
            if rank == 1:
                exchange.carrier.close()
                raise RunError("the moon is full", "wait")
            step(exchange, model, 1)

    with pytest.raises(PeerError if rank == 0 else RunError) as caught:
        run()
    return str(caught.value)


def test_a_rank_that_waits_hears_why_the_other_is_gone() -> None:
    assert run_ranks(2, _peer_fails) == [
        "rank 1: the moon is full; wait", "the moon is full; wait"
    ]  # fmt: skip


def _memory(rank: int) -> str:
    with joined() as group:
        model = net()
        exchange = exchange_of(model, group)
        planned = exchange.carrier._planned  # type: ignore[attr-defined]
        take = planned.staging.take

        def full(name: str, *values: Any, **options: Any) -> Tensor:
            if name == "wire":
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            found: Tensor = take(name, *values, **options)
            return found

        planned.staging.take = full
        with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
            step(exchange, model, 0)
        exchange.carrier.close()
        assert planned.groups.world is None, "the other ranks must find out"
        return str(caught.value)


def test_memory_that_runs_out_on_the_thread_is_raised_where_the_step_waits() -> None:
    assert run_ranks(2, _memory) == ["DefaultCPUAllocator: can't allocate memory"] * 2
