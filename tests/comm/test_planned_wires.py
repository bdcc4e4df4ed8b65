"""A plan with several wire formats, as the planner makes it, run by the communication module."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from comm.exchanges import CPU, joined
from paceline.comm.exchange import GradientExchange, Signals, tensor_spec
from paceline.comm.plan_choice import PlanChoice
from paceline.comm.settings import CommSettings
from paceline.comm.transport import create_transport
from paceline.plan import ClusterFacts, FusionPlan, ModelFacts, PlanFile
from paceline.plan.cluster import Cluster, Link
from paceline.plan.optimizer import Gradient, best_plan
from paceline.planner.workload import Affine, Workload
from ranks import run_ranks

WIDE = Cluster(2, 1, Link(0, 0), Link(1e-5, 1e-8), cast_s=1e-10)
# Gradients of whole numbers up to 2048: fp16 holds them and their sum.
LARGEST = 1024


def net() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 512), nn.Linear(512, 16))
    model[2].weight.data = model[2].weight.data.bfloat16()
    return model


def planned(model: nn.Module, *names: str) -> tuple[Workload, FusionPlan]:
    named = list(reversed(list(model.named_parameters())))
    gradients = tuple(
        Gradient(name, p.numel(), p.dtype != torch.float32, (i + 1) / len(named))
        for i, (name, p) in enumerate(named)
    )
    work = Workload("net", gradients, Affine(0, 1e-9), Affine(4e-3, 0), 0.0)
    return work, best_plan(work, WIDE, 1, names, ("auto", "float16"))


def write_plan(model: nn.Module, path: Path) -> None:
    sizes = [(name, p.numel()) for name, p in model.named_parameters()]
    plan = planned(model, "ring", "tree")[1]
    PlanFile(plan, ModelFacts.of(sizes), ClusterFacts(2, 1)).write(path)


def _exchanged(rank: int, path: str) -> tuple[list[torch.Tensor], float, list[str]]:
    with joined() as group:
        model = net()
        settings = CommSettings(plan=path)
        tensors = [tensor_spec(name, p) for name, p in model.named_parameters()]
        plan = PlanChoice.read(settings, tensors, ClusterFacts(2, 1)).plan(())
        transport = create_transport(group, settings, plan)
        exchange = GradientExchange(model.named_parameters(), group, plan, transport=transport)
        exchange.begin()
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = whole_numbers(parameter, rank, number)
        exchange.gather()
        exchange.reduce(torch.tensor(0.1), Signals())
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        formats = [message.wire for messages in exchange.messages for message in messages]
        loss = float(exchange.tail[0])
        transport.close()
    return found, loss, formats


def whole_numbers(like: torch.Tensor, rank: int, number: int) -> torch.Tensor:
    limit = LARGEST if like.dtype == torch.float32 else 64
    draw = torch.Generator(CPU).manual_seed(100 * rank + number)
    return torch.randint(-limit, limit, like.shape, generator=draw).to(like.dtype)


def test_it_runs_and_sums_exactly(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    write_plan(net(), path)
    (first, loss, formats), (second, *_) = run_ranks(2, _exchanged, str(path))
    assert {"auto", "float16", "float32"} >= set(formats) >= {"auto", "float16"}
    for number, (ours, theirs, like) in enumerate(
        zip(first, second, net().parameters(), strict=True)
    ):
        wanted = sum(whole_numbers(like, rank, number).float() for rank in range(2))
        assert torch.equal(ours, theirs)
        assert torch.equal(ours.float(), wanted)
    # In fp16 the loss would have lost its digits.
    assert abs(loss - 0.2) < 1e-7
