"""`pl.DataParallel` keeps DDP's contract, bit for bit where the all-reduce is the backend's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from custom_loop.nets import Net, batch, flat, gradients, make_net
from paceline.core.errors import CommError, ConfigError, PacelineError
from paceline.plan import PlanFile, SizeTable
from paceline.plan.plan_file import ClusterFacts
from ranks import run_ranks


def _loss(model: nn.Module, rank: int, step: int, **named: Any) -> Tensor:
    images, labels = batch(rank, step)
    return F.cross_entropy(model(images, **named), labels)


def _compare(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """The same steps through torch's DDP and through ours: gradients, buffers and weights."""
    with pl.init(device="cpu", timeout_s=120):
        found: dict[str, Any] = {}
        for kind in ("ddp", "ours"):
            # Each rank draws other weights: rank 0's count.
            net = make_net(seed=rank)
            if kind == "ddp":
                model: nn.Module = DistributedDataParallel(net, bucket_cap_mb=0.001)
            else:
                model = pl.DataParallel(net, bucket_mib=0.001, **options)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            for step in range(3):
                optimizer.zero_grad()
                if step == 1:  # accumulates
                    with model.no_sync():
                        _loss(model, rank, 10).backward()
                _loss(model, rank, step).backward()
                seen = gradients(net)
                optimizer.step()
            model.eval()
            assert not net.training
            images, _ = batch(0, 99)
            found[kind] = (seen, dict(net.named_buffers()), flat(net), model(images).detach())
        return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_native_gradients_have_the_bits_of_ddp(ranks: int) -> None:
    results = run_ranks(ranks, _compare, {})
    for found in results:
        (theirs, their_buffers, their_weights, their_out) = found["ddp"]
        (ours, our_buffers, our_weights, our_out) = found["ours"]
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert all(torch.equal(our_buffers[n], their_buffers[n]) for n in their_buffers)
        assert torch.equal(our_weights, their_weights)
        assert torch.equal(our_out, their_out)
        assert torch.equal(our_weights, results[0]["ours"][2])


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [({"wire": "fp16"}, 2e-3), ({"algorithm": "ring"}, 1e-6),
     ({"algorithm": "hierarchical", "wire": "bf16"}, 2e-2)],
)  # fmt: skip
def test_other_exchanges_are_within_rounding(options: dict[str, Any], tolerance: float) -> None:
    results = run_ranks(2, _compare, options)
    for found in results:
        theirs, ours = found["ddp"], found["ours"]
        largest = max(float(gradient.abs().max()) for gradient in theirs[0].values())
        for name, gradient in theirs[0].items():
            near = {"rtol": tolerance, "atol": tolerance * largest}
            torch.testing.assert_close(ours[0][name], gradient, **near)
        assert torch.equal(ours[2], results[0]["ours"][2]), "ranks differ"
        assert not torch.equal(ours[2], theirs[2]) or options == {"algorithm": "ring"}


def _unused(rank: int) -> tuple[Any, ...]:
    """Rank 0 does not use a layer that rank 1 uses; then none does."""
    with pl.init(device="cpu", timeout_s=120):
        net = make_net()
        model = pl.DataParallel(net, find_unused_parameters=True, wire="fp16")
        _loss(model, rank, 0, extra=rank == 1).backward()
        one = net.extra.weight.grad.clone()
        net.zero_grad(set_to_none=True)
        _loss(model, rank, 0, extra=False).backward()
        return one, net.extra.weight.grad


def test_unused_parameters() -> None:
    (one, none), (other, none_either) = run_ranks(2, _unused)
    assert torch.equal(one, other)
    assert float(one.abs().sum()) > 0
    assert none is None
    assert none_either is None


def _scaled(rank: int) -> tuple[list[float], Tensor, int]:
    """GradScaler and autocast: rank 1's gradients overflow once, and both ranks skip that step."""
    with pl.init(device="cpu", timeout_s=120):
        net = make_net()
        model = pl.DataParallel(net, wire="fp16")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scales = []
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = _loss(model, rank, step)
            if step == 1 and rank == 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert all(p.dtype == torch.float32 for p in net.parameters())
        return scales, flat(net), len(scales)


def test_grad_scaler_skips_on_all_ranks() -> None:
    (scales, weights, _), (other_scales, other_weights, _) = run_ranks(2, _scaled)
    assert scales == other_scales == [1024.0, 512.0, 512.0]
    assert torch.equal(weights, other_weights)
    assert bool(torch.isfinite(weights).all())


def test_alone_it_is_the_module_itself() -> None:
    net, same = make_net(), make_net()
    model = pl.DataParallel(net, wire="fp16", algorithm="ring")
    with model.no_sync():
        _loss(model, 0, 0).backward()
    _loss(same, 0, 0).backward()
    assert all(torch.equal(a, b) for a, b in zip(
        gradients(model).values(), gradients(same).values(), strict=True))  # fmt: skip
    assert model.fc is net.fc
    assert model.get_submodule("conv") is net.conv
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing


def test_names_have_no_prefix_also_inside_another_module() -> None:
    net = make_net()
    model = pl.DataParallel(net)
    assert list(model.state_dict()) == list(net.state_dict())
    assert [name for name, _ in model.named_parameters()] == [n for n, _ in net.named_parameters()]
    assert [g["role"] for g in pl.parameter_groups(model, 1e-4)] == ["weight", "bias_norm"]
    other = pl.DataParallel(make_net(seed=1))
    other.load_state_dict(net.state_dict())
    assert torch.equal(flat(other), flat(net))
    outer, copy = nn.ModuleDict({"net": model}), nn.ModuleDict({"net": pl.DataParallel(Net())})
    assert set(outer.state_dict()) == {f"net.{name}" for name in net.state_dict()}
    copy.load_state_dict(outer.state_dict())
    assert torch.equal(flat(copy), flat(net))


def _planned(rank: int, path: str) -> str:
    with pl.init(device="cpu", timeout_s=120):
        try:
            model = pl.DataParallel(make_net(), plan=path)
        except PacelineError as error:
            return str(error)
        assert model._hybrid is not None
        return " ".join(model._hybrid.table.algorithms)


def test_a_plan_file_gives_the_table_of_sizes(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    PlanFile(sizes=SizeTable.two_way(64), cluster=ClusterFacts(2, 1)).write(path)
    assert run_ranks(2, _planned, str(path)) == ["hierarchical ring"] * 2
    elsewhere = run_ranks(3, _planned, str(path))
    assert len(set(elsewhere)) == 1
    assert "was tuned on 2 ranks" in elsewhere[0]


def _differ(rank: int, what: str) -> str:
    net = nn.Linear(2, 2) if what == "model" and rank else make_net()
    wires = {"wire": (None, "fp16"), "one": ("fp16", "fp8")}
    wire = wires.get(what, (None, None))[rank]
    with pl.init(device="cpu", timeout_s=120), pytest.raises(PacelineError) as caught:
        pl.DataParallel(net, wire=wire)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("wire", "ranks differ in wire"),
        ("model", "the trained parameters"),
        ("one", "wire = 'fp8'"),
    ],
)
def test_ranks_that_differ_all_fail_with_one_line(what: str, words: str) -> None:
    texts = run_ranks(2, _differ, what)
    assert all(words in text and "\n" not in text for text in texts)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"wire": "fp8"}, "wire"), ({"algorithm": "rign"}, "did you mean 'ring'"),
     ({"bucket_mib": 0}, "bucket_mib"), ({"plan": "nowhere.toml"}, "cannot be read"),
     ({"plan": "p.toml", "algorithm": "ring"}, "leave one of the two out")],
)  # fmt: skip
def test_mistakes_are_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        pl.DataParallel(make_net(), **options)


def test_wrapping_twice_or_nothing_or_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="wrapped already"):
        pl.DataParallel(pl.DataParallel(make_net()))
    with pytest.raises(ConfigError, match="requires a gradient"):
        pl.DataParallel(make_net().requires_grad_(False))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2" if name != "RANK" else "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(CommError, match=r"paceline\.init"):
        pl.DataParallel(make_net())
