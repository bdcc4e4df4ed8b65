"""`pl.prepare`: masters, loss scale, the agreed skip, exact state; beside DataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl
from custom_loop.nets import batch, flat, make_net
from paceline.core.errors import CheckpointError, ConfigError, PacelineError
from paceline.precision.settings import PrecisionSettings
from paceline.train.checkpoint import content_hash
from ranks import run_ranks

HALF: dict[str, Any] = {"precision": "fp16", "loss_scale_init": 2.0**12}


def train(
    prepared: pl.Prepared, steps: range, rank: int = 0, model: Any = None, poison: int = -1
) -> None:
    for step in steps:
        images, labels = batch(rank, step)
        with prepared.autocast():
            loss = F.cross_entropy((model or prepared.model)(images).float(), labels)
        prepared.backward(loss * torch.inf if step == poison else loss)
        prepared.step()


def test_fp32_on_a_cpu_is_plain_sgd() -> None:
    net, plain = make_net(), make_net()
    prepared = pl.prepare(net, "sgd", lr=0.1, weight_decay=0.0)
    train(prepared, range(4))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        images, labels = batch(0, step)
        optimizer.zero_grad()
        F.cross_entropy(plain(images), labels).backward()
        optimizer.step()
    torch.testing.assert_close(flat(net), flat(plain), rtol=1e-6, atol=1e-7)
    assert (prepared.precision, prepared.loss_scale, prepared.skipped_steps) == ("fp32", 1.0, 0)


def test_layers_have_their_share_of_the_rate() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    prepared = pl.prepare(net, "sgd", lr=0.1, layer_decay=0.5)
    for rate in (0.1, 0.4):
        prepared.lr = prepared.lr if rate == 0.1 else rate
        rates = {group["lr"] for group in prepared.optimizer.param_groups}
        assert (prepared.lr, sorted(rates)) == (rate, [rate / 4, rate / 2, rate])


@pytest.mark.parametrize("name", ["sgd", "lars", "muon"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_follows_fp32(name: str, precision: str) -> None:
    nets = {}
    for kind in ("fp32", precision):
        nets[kind] = make_net()
        drawn = flat(nets[kind])
        prepared = pl.prepare(nets[kind], name, lr=0.1, precision=kind)
        assert torch.equal(torch.cat([m.flatten() for m in _masters(prepared)]), drawn)
        train(prepared, range(5))
    assert nets[precision].conv.weight.dtype != torch.float32
    assert nets[precision].norm.weight.dtype == torch.float32
    torch.testing.assert_close(flat(nets[precision]), flat(nets["fp32"]), rtol=0.05, atol=0.01)
    full = prepared.full_state_dict()
    assert all(value.dtype != torch.float16 for value in full.values())
    master = full["conv.weight"]
    assert torch.equal(nets[precision].conv.weight, master.to(nets[precision].conv.weight.dtype))


def _masters(prepared: pl.Prepared) -> list[Tensor]:
    """In the order of the model's parameters."""
    full = prepared.full_state_dict()
    return [full[name] for name, _ in prepared.model.named_parameters()]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_clipped_gradients_have_the_given_norm(precision: str) -> None:
    """Plain SGD with rate 1 moves by the clipped gradient; an overflow is still an overflow."""
    net = make_net()
    before = flat(net)
    prepared = pl.prepare(
        net, "sgd", lr=1.0, precision=precision, momentum=0.0, weight_decay=0.0, clip_norm=0.01
    )
    train(prepared, range(1))
    moved = torch.cat([m.flatten() for m in _masters(prepared)]) - before
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)
    train(prepared, range(1, 2), poison=1)
    assert prepared.skipped_steps == 1


def test_state_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrecisionSettings, "SCALE_INTERVAL", 2)
    whole, other = (pl.prepare(make_net(seed), "lars", lr=1.0, **HALF) for seed in (0, 5))
    train(whole, range(3), poison=1)
    other.load_state_dict(whole.state_dict())
    for prepared in (whole, other):
        train(prepared, range(3, 7))
    ours, theirs = other.state_dict(), whole.state_dict()
    for state in (ours, theirs):
        state["optimizer"] = state["optimizer"]["state"]
    assert content_hash(ours) == content_hash(theirs)
    assert whole.loss_scale not in (1.0, HALF["loss_scale_init"])
    with pytest.raises(CheckpointError, match="the saved state has precision fp16"):
        pl.prepare(make_net(), "lars", lr=1.0).load_state_dict(whole.state_dict())


def test_our_optimizers_are_taken_with_their_state() -> None:
    """An optimizer that has stepped in fp32 goes on in fp16, its masters exact."""
    net = make_net()
    optimizer = pl.SGD(pl.parameter_groups(net, 1e-4), lr=0.1)
    images, labels = batch(0, 0)
    F.cross_entropy(net(images), labels).backward()
    optimizer.step()
    drawn = flat(net)
    momentum = optimizer.state[net.conv.weight]["momentum_buffer"].clone()
    prepared = pl.prepare(net, optimizer, precision="fp16")
    assert torch.equal(torch.cat([m.flatten() for m in _masters(prepared)]), drawn)
    assert torch.equal(optimizer.state[net.conv.weight]["momentum_buffer"], momentum)
    train(prepared, range(1, 3))
    assert prepared.optimizer is optimizer
    prepared.lr = 0.05
    assert {group["lr"] for group in optimizer.param_groups} == {0.05}


def _ranks(rank: int, wrapped: bool, wire: str | None, precision: str) -> tuple[Any, ...]:
    """Rank 1 overflows in step 1: both ranks skip it, whether or not gradients are exchanged."""
    with pl.init(device="cpu", timeout_s=120):
        prepared = pl.prepare(
            make_net(seed=rank), "lars", lr=0.5, precision=precision, loss_scale_init=2.0**12
        )
        model = pl.DataParallel(prepared.model, wire=wire) if wrapped else None
        start = content_hash(prepared.state_dict()["optimizer"]["state"])
        train(prepared, range(4), rank, model, poison=1 if rank == 1 else -1)
        masters = torch.cat([m.flatten() for m in _masters(prepared)])
        if not wrapped:  # each rank has gone its own way, but for the skip
            dist.all_reduce(masters)
        return start, masters, prepared.loss_scale, prepared.skipped_steps


@pytest.mark.parametrize(
    ("wrapped", "wire", "precision"),
    [(True, None, "fp16"), (True, "fp16", "fp32"), (True, "bf16", "bf16"), (False, None, "fp16")],
)
def test_all_ranks_skip_alike(wrapped: bool, wire: str | None, precision: str) -> None:
    one, two = run_ranks(2, _ranks, wrapped, wire, precision)
    assert one[0] == two[0]  # rank 0's weights, also in the masters
    assert torch.equal(one[1], two[1])
    assert bool(torch.isfinite(one[1]).all())
    # What computes or travels in fp16 has a scale.
    scale = 1.0 if precision == "bf16" else 2.0**11
    assert one[2:] == two[2:] == (scale, 1)


def _refused(rank: int) -> str:
    with pl.init(device="cpu", timeout_s=120), pytest.raises(PacelineError) as caught:
        pl.prepare(make_net(), "lars" if rank else "sgd", lr=0.1)
    return str(caught.value)


def test_ranks_with_other_optimizers_fail_alike() -> None:
    texts = run_ranks(2, _refused)
    assert texts[0] == texts[1]
    assert "ranks differ in optimizer" in texts[0]


def test_an_optimizer_without_masters_is_refused() -> None:
    net = make_net()
    adam = torch.optim.Adam(net.parameters())
    with pytest.raises(ConfigError, match="does not support fp32 masters"):
        pl.prepare(net, adam, precision="fp16")
    assert net.conv.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimizer": "adamm", "lr": 1.0}, "optim.name"),
        ({"optimizer": "sgd"}, "lr"),
        ({"lr": 0.1, "precision": "fp17"}, "precision = 'fp17'"),
        ({"lr": 0.1, "momentun": 0.9}, "did you mean 'momentum'"),
        ({"lr": -1.0}, "optim.lr"),
        ({"lr": 0.1, "clip_norm": -1.0}, "clip_norm"),
        ({"lr": 0.1, "schedule": "cosine"}, "schedule: unknown"),
    ],
)
def test_mistakes_are_one_line(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        pl.prepare(make_net(), **arguments)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_together() -> None:
    net = make_net()
    with pytest.raises(ConfigError, match=r"prepare the module first"):
        pl.prepare(pl.DataParallel(net), "sgd", lr=0.1)
    with pytest.raises(ConfigError, match="already set in the given optimizer"):
        pl.prepare(net, pl.SGD(net.parameters(), 0.1), lr=0.1)
    with pytest.raises(ConfigError, match="not of the model"):
        pl.prepare(net, pl.SGD(make_net().parameters(), 0.1))
    with pytest.raises(ConfigError, match="nothing is trained"):
        pl.prepare(make_net().requires_grad_(False), "sgd", lr=0.1)
