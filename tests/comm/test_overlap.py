"""Buffers of a plan leave while backward goes on, in the plan's order, and the sums stay the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from comm.exchanges import CPU, agreed, alone, joined
from paceline.comm.carrier import DirectCarrier, Piece, Tell, Wait
from paceline.comm.gradient_exchange import GradientExchange
from paceline.comm.group import Group
from paceline.plan import FusionBuffer, FusionPlan
from ranks import run_ranks


class Late:
    """A carrier that overlaps: it notes what it is given and sums only when waited for."""

    name = "late"
    overlaps = True
    recordable = False

    def __init__(self, group: Group, log: list[str]) -> None:
        self._direct = DirectCarrier(group)
        self.log = log

    def send(self, pieces: Sequence[Piece], begun: Tell, ended: Tell) -> Wait:
        before = [piece.tensor.clone() for piece in pieces]
        self.log += [f"send {piece.algorithm} {piece.tensor.numel()}" for piece in pieces]

        def wait() -> None:
            for piece, there in zip(pieces, before, strict=True):
                assert torch.equal(piece.tensor, there), "a message on its way was written to"
            self._direct.send(pieces, begun, ended)()

        return wait

    def close(self) -> None:
        """Nothing is held."""


class Net(nn.Module):
    """Four layers; the second is used twice, the last not at all where asked for."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.d, self.idle = nn.Linear(8, 2), nn.Linear(2, 2)
        self.log = log

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if x.requires_grad:
            x.register_hook(lambda grad: self.log.append("backward reaches a"))
        x = self.b(torch.tanh(self.b(torch.tanh(x))))
        out: Tensor = self.d(torch.tanh(self.c(torch.tanh(x))))
        return out


def plan(pools: list[list[str]]) -> FusionPlan:
    names = [[f"{layer}.{kind}" for layer in pool for kind in ("weight", "bias")] for pool in pools]
    return FusionPlan(
        tuple(FusionBuffer(tuple(pool), f"way{number}") for number, pool in enumerate(names))
    )


POOLS = [["d", "c"], ["b"], ["a", "idle"]]


def step(
    group: Group, pools: list[list[str]] | None, micro: int = 1, *, late: bool = True
) -> tuple[list[Tensor], list[str], list[float]]:
    """One exchange; gradients, log of events, and uses by tensor."""
    log: list[str] = []
    net = Net(log)
    exchange = GradientExchange(
        net.named_parameters(), group, plan(pools) if pools else None, accumulate=micro > 1,
        carrier=Late(group, log) if late else None,
    )  # fmt: skip
    for _ in range(2):  # the second step must not see anything of the first
        log.clear()
        exchange.begin()
        for turn in range(micro):
            torch.manual_seed(10 * group.rank + turn)
            if turn == micro - 1:
                exchange.arm()
            net(torch.randn(5, 3)).square().sum().backward()
            exchange.gather()
        log.append("backward is over")
        signals = agreed(exchange, loss=0.5, terminate=float(group.rank))
        assert signals.loss == 0.5 * group.world_size
    grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    names = [name for name, _ in net.named_parameters()]
    uses = dict(zip(exchange.names, exchange.uses.tolist(), strict=True))
    return grads, log, [uses[name] for name in names]


@pytest.mark.parametrize("micro", [1, 3])
def test_full_buffers_leave_before_backward_is_over(micro: int) -> None:
    expected, _, uses = step(alone(), None, micro, late=False)
    grads, log, ours = step(alone(), POOLS, micro)
    for got, want in zip(grads, expected, strict=True):
        assert torch.equal(got, want)
    assert ours == uses
    last = log.index("backward is over")
    sent = [line.split()[1] for line in log if line.startswith("send")]
    assert sent == ["way0", "way1", "way2"]
    first = next(i for i, line in enumerate(log) if line.startswith("send way0"))
    assert first < len(log) - 1 - log[::-1].index("backward reaches a") < last
    # `idle` has no gradient, so its buffer can only leave at the end.
    assert next(line for line in log[last:] if line.startswith("send")).startswith("send way2")


def test_only_the_last_micro_step_sends() -> None:
    _, log, _ = step(alone(), POOLS, 3)
    assert log.count("backward reaches a") == 3
    third = [i for i, line in enumerate(log) if line == "backward reaches a"][1]
    assert not any(line.startswith("send") for line in log[:third])


def test_buffers_wait_for_their_turn() -> None:
    """A plan against backward's order: nothing may overtake the first buffer."""
    expected, _, _ = step(alone(), None, late=False)
    grads, log, _ = step(alone(), [["a", "idle"], ["b"], ["d", "c"]])
    for got, want in zip(grads, expected, strict=True):
        assert torch.equal(got, want)
    last = log.index("backward is over")
    assert not any(line.startswith("send") for line in log[:last])
    assert [line.split()[1] for line in log[last:] if line.startswith("send")] == [
        "way0", "way1", "way2",
    ]  # fmt: skip


def _on_rank(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    with joined() as group:
        return step(group, None, 2, late=False)[0], step(group, POOLS, 2)[0]


def test_ranks_agree_with_and_without_overlap() -> None:
    results = run_ranks(2, _on_rank)
    for plain, late in results:
        for one, other, first in zip(plain, late, results[0][1], strict=True):
            assert torch.equal(one, other)
            assert torch.equal(other, first)


def test_formats_of_one_buffer_travel_as_one_piece_each() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    for layer in (net[0], net[2]):
        layer.weight.data = layer.weight.data.half()  # type: ignore[union-attr, operator]
    log: list[str] = []
    pools = FusionPlan(
        (
            FusionBuffer(("2.bias", "2.weight"), "late"),
            FusionBuffer(("1.bias", "1.weight", "0.bias", "0.weight"), "early"),
        )
    )
    exchange = GradientExchange(net.named_parameters(), alone(), pools, carrier=Late(alone(), log))
    exchange.begin()
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    exchange.gather()
    agreed(exchange, loss=1.0)
    tail = exchange.tail.numel()
    assert log == ["send late 32", "send late 32", f"send early {96 + tail}", "send early 32"]
    assert all(bool((p.grad == 2).all()) for p in net.parameters() if p.grad is not None)
    assert exchange.buffers["float16"].device == CPU


def test_a_replayed_recording_has_sent_what_it_sent_when_it_was_made() -> None:
    log: list[str] = []
    net = Net(log)
    exchange = GradientExchange(
        net.named_parameters(), alone(), plan(POOLS), carrier=Late(alone(), log)
    )
    exchange.begin()
    exchange.arm()
    net(torch.ones(5, 3)).sum().backward()
    exchange.gather()
    exchange.join()  # as a recording must before it ends
    assert [line for line in log if "send" in line] == ["send way0 160", "send way1 96"]
    uses, sent = exchange.gathered, exchange.sent
    assert sent == 2
    agreed(exchange)
    before = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    log.clear()
    exchange.begin()
    exchange.note_replay(uses, sent)  # the buffers still hold what a replay would put there
    agreed(exchange)
    assert [line.split()[1] for line in log] == ["way2"]
    after = [p.grad for p in net.parameters() if p.grad is not None]
    for ours, theirs in zip(after, before, strict=True):
        assert torch.equal(ours, theirs)
