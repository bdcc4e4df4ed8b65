"""The exchange of gradients: sums, number formats, accumulation, signals, overlap, CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from comm.exchanges import agreed, alone, grads, joined, uses
from paceline.comm import GradientExchange, Group, Signals
from paceline.comm.transport import DirectTransport, Notify, Piece, Wait
from paceline.core.errors import ConfigError
from paceline.plan import FusionBucket, FusionPlan
from ranks import run_ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 4))


def mixed(dtype: torch.dtype = torch.float16) -> nn.Sequential:
    """Returns half-precision weights and fp32 biases, as `Policy.convert` makes them."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(4, 2))
    for layer in model:
        layer.weight.data = layer.weight.data.to(dtype)
    return model


def put(parameter: nn.Parameter, value: float) -> None:
    """Sets a gradient, as a backward pass does."""
    parameter.grad = torch.full_like(parameter, value)


def values(model: nn.Module) -> list[list[float]]:
    return [grad.float().unique().tolist() for grad in grads(model)]


def _sums(rank: int) -> tuple[list[Tensor], list[Signals]]:
    with joined() as group:
        model = net()
        exchange = GradientExchange(model.named_parameters(), group)
        torch.manual_seed(rank)
        exchange.begin()
        model(torch.randn(2, 3, 8, 8)).square().sum().backward()
        exchange.gather()
        signals = [agreed(exchange, 0.5 + rank, terminate=float(rank))]
        sums = grads(model)
        for own in ({"fault": 1.0}, {"abandon": 1.0}, {"corrupt": 3.0}, {}):
            exchange.begin()
            signals.append(agreed(exchange, 1.0, **(own if rank == 1 else {})))
        return sums, signals


def test_gradients_and_signals_are_summed_over_ranks() -> None:
    (first, signals), (second, same) = run_ranks(2, _sums)
    model = net()
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for rank in range(2):
        torch.manual_seed(rank)
        model.zero_grad()
        model(torch.randn(2, 3, 8, 8)).square().sum().backward()
        for total, own in zip(expected, grads(model), strict=True):
            total += own
    for ours, theirs, want in zip(first, second, expected, strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, want)
    # Each signal of one rank reaches all, in its own step only.
    others = [Signals(2.0, fault=1.0), Signals(2.0, abandon=1.0), Signals(2.0, 3.0), Signals(2.0)]
    assert signals == same == [Signals(loss=2.0, terminate=1.0), *others]


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_are_views_of_the_buffer_with_the_parameters_strides(passes: int) -> None:
    model = net().to(memory_format=torch.channels_last)
    exchange = GradientExchange(model.named_parameters(), alone(), accumulate=passes > 1)
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    model(images).square().sum().backward()
    once = grads(model)
    exchange.begin()
    for _ in range(passes):  # micro-steps add up
        model(images).square().sum().backward()
        exchange.gather()
        assert all(p.grad is None for p in model.parameters())
    exchange.reduce(torch.zeros(()), Signals())
    buffer = exchange.buffers["float32"]
    for parameter, want in zip(model.parameters(), once, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()
        assert parameter.grad.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        torch.testing.assert_close(parameter.grad, passes * want)
    assert model[0].weight.stride() != model[0].weight.contiguous().stride()
    exchange.begin()
    agreed(exchange)
    assert not buffer.any(), "something of the last step is left in the next"


def test_frozen_parameters_stay_out_and_unused_ones_are_zero() -> None:
    parts = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("used", "idle", "ice")})
    parts["ice"].requires_grad_(False)
    exchange = GradientExchange(parts.named_parameters(), alone())
    assert exchange.plan.tensors[0] == "idle.bias", "the last layer comes first"
    exchange.buffers["float32"].fill_(7.0)  # what an earlier step left
    exchange.begin()
    parts["used"](torch.ones(1, 2)).sum().backward()
    exchange.gather()
    agreed(exchange)
    assert parts["ice"].weight.grad is None
    assert float(parts["idle"].weight.grad.abs().sum()) == 0  # type: ignore[union-attr]
    assert float(parts["used"].weight.grad.abs().sum()) > 0  # type: ignore[union-attr]
    assert uses(exchange) == {
        "used.weight": 1.0, "used.bias": 1.0, "idle.weight": 0.0, "idle.bias": 0.0
    }  # fmt: skip
    with pytest.raises(ConfigError, match="plan: lacks"):
        GradientExchange(
            parts.named_parameters(), alone(), FusionPlan((FusionBucket(("used.bias",)),))
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_weights_and_fp32_rest_have_a_buffer_each(dtype: torch.dtype) -> None:
    model = mixed(dtype).to(memory_format=torch.channels_last)
    exchange = GradientExchange(model.named_parameters(), alone())
    exchange.begin()
    for number, parameter in enumerate(model.parameters()):
        put(parameter, 1.5 + number)
    exchange.gather()
    assert agreed(exchange, 0.1).loss == pytest.approx(0.1), "signals travel in fp32"
    half = str(dtype).removeprefix("torch.")
    assert set(exchange.buffers) == {half, "float32"}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        grad = parameter.grad
        assert grad is not None
        assert (grad.dtype, grad.stride()) == (parameter.dtype, parameter.stride())
        assert grad.unique().tolist() == [1.5 + number], name
        home = exchange.buffers[half if name.endswith("weight") else "float32"]
        assert grad.untyped_storage().data_ptr() == home.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("passes", "weight", "bias"),
    [
        # fp16 has steps of 2 above 2048: added there, each 0.5 would be lost.
        ((2048.0, *(0.5,) * 16), 2056.0, 2056.0),
        ((40000.0, 40000.0), float("inf"), 80000.0),
    ],
)
def test_micro_steps_add_up_in_fp32_and_are_rounded_once(
    passes: tuple[float, ...], weight: float, bias: float
) -> None:
    model = mixed()
    exchange = GradientExchange(model.named_parameters(), alone(), accumulate=True)
    exchange.begin()
    for value in passes:
        for parameter in model.parameters():
            put(parameter, value)
        exchange.gather()
    agreed(exchange)
    assert values(model) == [[weight], [bias]] * 2


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_parameter_that_one_micro_step_does_not_reach_keeps_its_sum(missing: int) -> None:
    model = mixed()
    exchange = GradientExchange(model.named_parameters(), alone(), accumulate=True)
    exchange.begin()
    for turn, value in enumerate((1.0, 2.0, 4.0)):
        for name, parameter in model.named_parameters():
            if turn != missing or not name.startswith("1"):
                put(parameter, value)
        exchange.gather()
    agreed(exchange)
    assert values(model) == [[7.0]] * 2 + [[7.0 - 2.0**missing]] * 2
    assert set(uses(exchange).values()) == {1.0}


def _partly(rank: int, accumulate: bool) -> tuple[dict[str, float], list[list[float]]]:
    """Gives layer 0 a gradient on rank 1 only, an infinite one, layer 1 on both, layer 2 on none."""
    with joined() as group:
        model = nn.Sequential(*mixed(), nn.Linear(2, 2).half())
        exchange = GradientExchange(model.named_parameters(), group, accumulate=accumulate)
        exchange.begin()
        for parameter in model[1].parameters():
            put(parameter, 1.0 + rank)
        if rank == 1:
            put(model[0].weight, float("inf"))
            put(model[0].bias, 5.0)
        exchange.gather()
        exchange.reduce(torch.zeros(()), Signals())
        return uses(exchange), values(model)


@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_and_overflows_of_some_ranks_are_seen_by_all(accumulate: bool) -> None:
    for counts, found in run_ranks(2, _partly, accumulate):
        assert counts == {
            "0.weight": 1.0, "0.bias": 1.0, "1.weight": 2.0, "1.bias": 2.0,
            "2.weight": 0.0, "2.bias": 0.0,
        }  # fmt: skip
        assert found == [[float("inf")], [5.0], [3.0], [3.0], [0.0], [0.0]]


class Late:
    """A transport that overlaps: it notes what it is given and sums only when waited for."""

    overlaps = True
    capturable = True
    memory = None

    def __init__(self, group: Group, log: list[str]) -> None:
        self._direct = DirectTransport(group)
        self.log = log

    def send(self, pieces: Sequence[Piece], begun: Notify, ended: Notify) -> Wait:
        before = [piece.tensor.clone() for piece in pieces]
        self.log += [f"send {piece.algorithm} {piece.tensor.numel()}" for piece in pieces]

        def wait() -> None:
            for piece, there in zip(pieces, before, strict=True):
                assert torch.equal(piece.tensor, there), "a message under way was written to"
            self._direct.send(pieces, begun, ended)()

        return wait

    def close(self) -> None:
        """Does nothing."""


class Net(nn.Module):
    """Four layers; the second is used twice, the last is not used."""

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
        return self.d(torch.tanh(self.c(torch.tanh(x))))


def plan(pools: Sequence[Sequence[str]]) -> FusionPlan:
    names = [[f"{layer}.{kind}" for layer in pool for kind in ("weight", "bias")] for pool in pools]
    return FusionPlan(
        tuple(FusionBucket(tuple(pool), f"way{number}") for number, pool in enumerate(names))
    )


BACKWARD = [["d", "c"], ["b"], ["a", "idle"]]
FORWARD = BACKWARD[::-1]


def step(
    group: Group, pools: list[list[str]] | None, micro: int = 1
) -> tuple[list[Tensor], list[str], dict[str, float]]:
    """Runs one exchange, with overlap if there are `pools`. Returns gradients, log, and uses."""
    log: list[str] = []
    model = Net(log)
    exchange = GradientExchange(
        model.named_parameters(), group, plan(pools) if pools else None, accumulate=micro > 1,
        transport=Late(group, log) if pools else None,
    )  # fmt: skip
    for _ in range(2):  # the second step must not see anything of the first
        log.clear()
        exchange.begin()
        for turn in range(micro):
            torch.manual_seed(10 * group.rank + turn)
            if turn == micro - 1:
                exchange.arm()
            model(torch.randn(5, 3)).square().sum().backward()
            exchange.gather()
        log.append("backward is over")
        signals = agreed(exchange, loss=0.5, terminate=float(group.rank))
        assert signals.loss == 0.5 * group.world_size
    return grads(model), log, uses(exchange)


def ways(log: list[str]) -> list[str]:
    return [line.split()[1] for line in log if line.startswith("send")]


@pytest.mark.parametrize("micro", [1, 3])
def test_full_buckets_are_sent_during_the_last_backward_pass(micro: int) -> None:
    expected, _, counts = step(alone(), None, micro)
    found, log, ours = step(alone(), BACKWARD, micro)
    assert all(map(torch.equal, found, expected))
    assert ours == counts
    last = log.index("backward is over")
    reached = [i for i, line in enumerate(log) if line == "backward reaches a"]
    assert ways(log) == ["way0", "way1", "way2"]
    assert len(reached) == micro
    assert ways(log[: reached[-1]])[:1] == ["way0"]
    assert micro == 1 or ways(log[: reached[-2]]) == []
    assert ways(log[last:]) == ["way2"], (
        "`idle` has no gradient: its bucket can only leave at the end"
    )


def test_no_bucket_overtakes_another() -> None:
    """A plan against backward's order: nothing may leave before the first bucket."""
    expected, _, _ = step(alone(), None)
    found, log, _ = step(alone(), FORWARD)
    assert all(map(torch.equal, found, expected))
    assert ways(log[log.index("backward is over") :]) == ways(log) == ["way0", "way1", "way2"]


def test_the_last_bucket_waits_for_the_signals() -> None:
    """Backward fills the last bucket like any other, but signals travel in it."""
    log: list[str] = []
    model = Net(log)
    model.idle.requires_grad_(False)
    pools = plan([["d", "c"], ["b"], ["a"]])
    exchange = GradientExchange(
        model.named_parameters(), alone(), pools, transport=Late(alone(), log)
    )
    exchange.begin()
    exchange.arm()
    model(torch.randn(5, 3)).sum().backward()
    exchange.gather()
    assert ways(log) == ["way0", "way1"]
    assert agreed(exchange, terminate=1.0).terminate == 1.0


def captured() -> tuple[GradientExchange, Net, list[str]]:
    log: list[str] = []
    model = Net(log)
    exchange = GradientExchange(
        model.named_parameters(), alone(), plan(BACKWARD), transport=Late(alone(), log)
    )
    return exchange, model, log


def run_pass(exchange: GradientExchange, model: Net, *, fails: bool = False) -> None:
    exchange.arm()
    model(torch.ones(5, 3)).sum().backward()
    exchange.gather()
    exchange.join()
    if fails:
        raise OSError("no graph")


def test_a_replay_has_gathered_and_sent_what_the_capture_did() -> None:
    exchange, model, log = captured()
    exchange.begin()
    with exchange.capture(sends=True):
        run_pass(exchange, model)
    assert ways(log) == ["way0", "way1"]
    agreed(exchange)
    before, counts = grads(model), uses(exchange)
    log.clear()
    exchange.begin()
    exchange.replay(sends=True)  # the buffers still hold what a replay would put there
    assert exchange.sent == 2
    agreed(exchange)
    assert ways(log) == ["way2"]
    assert all(map(torch.equal, grads(model), before))
    assert uses(exchange) == counts


def test_a_capture_that_fails_has_sent_nothing() -> None:
    exchange, model, log = captured()
    exchange.begin()
    with pytest.raises(OSError, match="no graph"), exchange.capture(sends=True):
        run_pass(exchange, model, fails=True)
    assert exchange.sent == 0
    log.clear()
    agreed(exchange, fault=1.0)
    assert ways(log) == ["way0", "way1", "way2"], "the other ranks wait for all of them"
