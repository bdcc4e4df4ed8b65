"""Transports and the communication thread: order, formats, events for observers, and failures."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comm.exchanges import CPU, agreed, alone, joined
from paceline.comm import (
    CommSettings,
    ExchangeObserver,
    GradientExchange,
    Group,
    PeerError,
    ProcessGroups,
    create_transport,
)
from paceline.comm.planned_transport import CommThread, NativeTransport, ThreadTransport
from paceline.comm.transport import Piece
from paceline.core.errors import CommError, RunError
from paceline.core.topology import Topology
from paceline.plan import FusionBucket, FusionPlan
from ranks import run_ranks

PLAN = FusionPlan(
    (
        FusionBucket(("4.bias", "4.weight"), "ring"),
        FusionBucket(("2.bias", "2.weight"), "hierarchical", "float16"),
        FusionBucket(("0.bias", "0.weight"), "native"),
    )
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


class Log(ExchangeObserver):
    """Records the events of an observer, and their threads."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.threads: set[str] = set()

    def step_begun(self, step: int) -> None:
        self.lines.append(f"step {step}")

    def sent(self, bucket: int) -> None:
        self.lines.append(f"sent {bucket}")

    def begun(self, bucket: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.lines.append(f"begun {bucket}")

    def ended(self, bucket: int) -> None:
        self.lines.append(f"ended {bucket}")

    def step_ended(self, exposed_s: float) -> None:
        self.lines.append("over" if exposed_s > 0 else "no time")


def exchange_of(model: nn.Module, group: Group, **options: Any) -> GradientExchange:
    transport = create_transport(group, CommSettings(timeout_s=20), PLAN)
    return GradientExchange(model.named_parameters(), group, PLAN, transport=transport, **options)


def step(exchange: GradientExchange, model: nn.Module, number: int = 0, passes: int = 1) -> None:
    exchange.begin(number)
    exchange.arm()
    for _ in range(passes):
        model(torch.ones(2, 3)).sum().backward()
    exchange.gather()
    agreed(exchange)


def _observed(rank: int) -> tuple[list[str], set[str]]:
    with joined() as group:
        model, log = net(), Log()
        exchange = exchange_of(model, group)
        exchange.observers = [ExchangeObserver(), log]
        step(exchange, model, 7)
        exchange.close()
        assert exchange.exposed() > 0
        return log.lines, log.threads


def test_an_observer_sees_every_bucket_in_order() -> None:
    for lines, threads in run_ranks(2, _observed):
        assert (lines[0], lines[-1]) == ("step 7", "over")
        assert threads == {"paceline-comm"}
        for event in ("sent", "begun", "ended"):
            assert [line for line in lines if event in line] == [f"{event} {n}" for n in range(3)]
        for number in range(3):
            order = [lines.index(f"{event} {number}") for event in ("sent", "begun", "ended")]
            assert order == sorted(order)
        # One thread runs all: a bucket begins when the one before has ended.
        assert lines.index("begun 1") > lines.index("ended 0")


def test_a_second_gradient_after_the_bucket_was_sent_is_refused() -> None:
    model = net()
    exchange = exchange_of(model, alone())
    with pytest.raises(RunError, match="gave 4.* a second gradient .* use --set comm.overlap=off"):
        step(exchange, model, passes=2)
    exchange.close()
    without = exchange_of(model := net(), alone(), overlap=False)
    step(without, model, passes=2)
    assert without.sent == 3
    without.close()


def _peer_fails(rank: int) -> str:
    """Rank 1 fails between two exchanges; rank 0 waits in the first bucket of the second."""

    def run() -> None:
        with Group(Topology.from_env(os.environ), CommSettings(timeout_s=20), CPU) as group:
            model = net()
            exchange = exchange_of(model, group)
            step(exchange, model)
            if rank == 1:
                exchange.close()
                raise RunError("the moon is full", "wait")
            step(exchange, model, 1)

    with pytest.raises(PeerError if rank == 0 else RunError) as caught:
        run()
    return str(caught.value)


def test_a_rank_that_waits_raises_the_error_of_the_rank_that_failed() -> None:
    assert run_ranks(2, _peer_fails) == [
        "rank 1: the moon is full; wait", "the moon is full; wait"
    ]  # fmt: skip


def _memory(rank: int) -> str:
    with joined() as group:
        model = net()
        exchange = exchange_of(model, group)
        assert isinstance(exchange.transport, ThreadTransport)
        planned = exchange.transport.planned
        carry = planned.carry

        def full(buffer: Tensor, algorithm: str, wire: str) -> None:
            if wire == "float16":
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            carry(buffer, algorithm, wire)

        planned.carry = full  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
            step(exchange, model)
        exchange.close()
        assert planned.groups.world is None, "the other ranks must notice"
        return str(caught.value)


def test_memory_that_runs_out_on_the_thread_is_raised_where_the_step_waits() -> None:
    assert run_ranks(2, _memory) == ["DefaultCPUAllocator: can't allocate memory"] * 2


def _native(rank: int) -> tuple[list[Tensor], list[str]]:
    with joined() as group:
        groups = ProcessGroups(group.topology, timeout_s=20, subgroups=False)
        transport = NativeTransport(group, groups)
        tensors = [torch.full((5,), rank + 1 / 3), torch.full((4,), rank + 1 / 3), torch.zeros(0)]
        half = [Piece(tensor, "native", "float16") for tensor in tensors[1:]]
        log: list[str] = []
        for _ in range(2):  # the memory of a wire format serves again
            log.clear()
            waits = [
                transport.send(
                    pieces,
                    lambda n=number: log.append(f"begun {n}"),  # type: ignore[misc]
                    lambda n=number: log.append(f"ended {n}"),  # type: ignore[misc]
                )
                for number, pieces in enumerate(([Piece(tensors[0], "native", "auto")], half))
            ]
            for wait in waits:
                wait()
        transport.close()
        return tensors, log


def test_native_messages_under_way_at_once_are_summed_each_in_its_format() -> None:
    """NCCL's transport, here over Gloo, which has asynchronous all-reduces too."""
    for (full, half, empty), log in run_ranks(2, _native):
        torch.testing.assert_close(full, torch.full((5,), 10 / 3))
        assert half.dtype == torch.float32
        torch.testing.assert_close(half, torch.full((4,), 10 / 3), rtol=1e-3, atol=0)
        assert not torch.equal(half, full[:4]), "it did not travel in fp16"
        assert empty.numel() == 0
        assert log == ["begun 0", "begun 1", "ended 0", "ended 1"]


def test_jobs_run_in_order_on_one_other_thread_and_nobody_waits() -> None:
    thread, seen, gate = CommThread(), [], threading.Event()

    def job(number: int) -> Tensor:
        gate.wait(100)
        seen.append((number, threading.current_thread().name))
        return torch.tensor(number)

    futures = [thread.submit(lambda n=n: job(n), CPU) for n in range(3)]
    assert not any(future.done() for future in futures)
    gate.set()
    assert [int(future.wait()) for future in futures] == [0, 1, 2]
    assert seen == [(number, "paceline-comm") for number in range(3)]
    thread.close()
    with pytest.raises(CommError, match="has ended"):
        thread.submit(lambda: torch.ones(1), CPU)


def test_after_a_failure_every_job_fails_with_its_error() -> None:
    thread = CommThread()

    def broken() -> Tensor:
        raise CommError("the link is cut", "mend it")

    futures = [thread.submit(job, CPU) for job in (broken, lambda: torch.ones(1))]
    for future in futures:
        with pytest.raises(Exception, match="the link is cut; mend it"):
            future.wait()
    thread.close()
