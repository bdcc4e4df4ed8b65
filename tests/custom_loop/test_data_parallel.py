"""`pl.DataParallel` keeps DDP's contract, bit for bit where the all-reduce is the backend's own."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim.swa_utils import AveragedModel

import paceline as pl
from custom_loop.nets import Net, batch, flat, gradients, make_net
from paceline.core.errors import CommError, ConfigError, PacelineError
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
                model = pl.DataParallel(net, bucket_cap_mb=0.001, **options)
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


def _scaled(rank: int) -> tuple[list[float], Tensor]:
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
        return scales, flat(net)


def test_grad_scaler_skips_on_all_ranks() -> None:
    (scales, weights), (other_scales, other_weights) = run_ranks(2, _scaled)
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


def test_state_dicts_of_ddp_are_loaded() -> None:
    net = make_net()
    saved = nn.ModuleDict({"module": net}).state_dict()  # as DDP names the entries
    model = pl.DataParallel(make_net(seed=1))
    model.load_state_dict(saved)
    assert torch.equal(flat(model), flat(net))
    assert all(name.startswith("module.") for name in saved)
    outer = nn.ModuleDict({"net": pl.DataParallel(make_net(seed=1))})
    outer.load_state_dict({f"net.{name}": value for name, value in saved.items()})
    assert torch.equal(flat(outer), flat(net))
    # A module whose own names begin with the prefix keeps them.
    own = nn.ModuleDict({"module": make_net(seed=1)})
    pl.DataParallel(own).load_state_dict(saved)
    assert torch.equal(flat(own), flat(net))


def test_tools_see_the_module() -> None:
    net = make_net()
    model = pl.DataParallel(net)
    # accelerate.unwrap_model and others unwrap by this.
    assert isinstance(model, DistributedDataParallel)
    assert model.module is net
    with model.join():
        _loss(model, 0, 0).backward()
    other = pl.DataParallel(nn.Linear(2, 2, device="meta"), device_ids=["meta"])
    assert other(torch.ones(1, 2)).device.type == "meta"


def _differ_in_batches(rank: int, options: dict[str, Any], by_initial: bool) -> Any:
    """Rank 1 has no batch at all, rank 0 has two; a copy of the model comes from the other rank."""
    with pl.init(device="cpu", timeout_s=120):
        model = copy.deepcopy(pl.DataParallel(make_net(), **options))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(divide_by_initial_world_size=by_initial):
            for step in range(2 - 2 * rank):
                optimizer.zero_grad()
                _loss(model, 0, step).backward()
                optimizer.step()
        return flat(model)


@pytest.mark.parametrize("options", [{}, {"algorithm": "ring"}, {"wire": "fp16"}])
def test_join_divides_by_all_ranks_or_by_those_that_train(options: dict[str, Any]) -> None:
    for by_initial, divisor in ((True, 2), (False, 1)):
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1 / divisor)
        for step in range(2):
            optimizer.zero_grad()
            _loss(net, 0, step).backward()
            optimizer.step()
        for weights in run_ranks(2, _differ_in_batches, options, by_initial):
            torch.testing.assert_close(weights, flat(net), rtol=1e-2, atol=2e-3)


def _copied(rank: int, path: str) -> Any:
    with pl.init(device="cpu", timeout_s=120):
        model = pl.DataParallel(make_net(), algorithm="ring")
        _loss(model, rank, 0).backward()
        wanted = gradients(model)
        if rank == 0:  # not a collective
            average = AveragedModel(model)
            average.update_parameters(model)
            torch.save(model, path)
        torch.distributed.barrier()
        found = []
        for other in (copy.deepcopy(model), torch.load(path, weights_only=False)):
            other.zero_grad()
            _loss(other, rank, 0).backward()
            found.append(all(torch.equal(wanted[n], g) for n, g in gradients(other).items()))
        return found


def test_copies_have_an_exchange_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    assert run_ranks(2, _copied, str(path)) == [[True, True]] * 2
    alone = torch.load(path, weights_only=False)
    _loss(alone, 0, 0).backward()
    assert gradients(alone).keys() == gradients(make_net()).keys()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, indices: Tensor) -> Tensor:
        return self.fc(self.table(indices))


def _sparse(rank: int) -> list[Tensor]:
    with pl.init(device="cpu", timeout_s=120):
        found = []
        for options in ({}, {"algorithm": "ring"}):
            torch.manual_seed(0)
            model = pl.DataParallel(Sparse(), **options)
            for _ in range(2):
                model.zero_grad()
                model(torch.tensor([rank, 3, 3])).square().sum().backward()
            assert model.module.table.weight.grad.is_sparse
            found.append(model.module.table.weight.grad.to_dense())
        return found


def test_sparse_gradients_travel() -> None:
    for native, ring in run_ranks(2, _sparse):
        assert float(native[:2].abs().min()) > 0
        torch.testing.assert_close(ring, native)


def _arguments(rank: int) -> list[str]:
    """Arguments of DDP that are honoured, and those that are refused."""
    with pl.init(device="cpu", timeout_s=120):
        net = make_net()
        net.fc.weight.data += rank
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            net, ["fc.weight", "norm.running_mean"]
        )
        own = net.fc.weight.detach().clone()
        group = torch.distributed.new_group([0, 1])
        model = pl.DataParallel(
            net, None, None, 0, process_group=group, bucket_cap_mb=1, find_unused_parameters=True,
            forward_sync_buffers=False,
        )  # fmt: skip
        assert torch.equal(net.fc.weight, own), "an ignored parameter was broadcast"
        _loss(model, rank, 0, extra=False).backward()
        local = make_net()
        local.load_state_dict(net.state_dict())
        assert model.process_group is group
        assert not model.forward_sync_buffers
        one = torch.distributed.new_group([rank], use_local_synchronization=True)
        half = _MixedPrecision(param_dtype=torch.float16)
        texts = []
        for named in ({"process_group": one}, {"mixed_precision": half}):
            with pytest.raises(ConfigError) as caught:
                pl.DataParallel(make_net(), algorithm="ring", **named)
            texts.append(str(caught.value))
        with pytest.raises(TypeError):
            pl.DataParallel(make_net(), bucket_mib=1)
        return [*texts, str(float(net.fc.weight.grad.sum()))]


def test_arguments_of_ddp_are_honoured_or_refused() -> None:
    first, second = run_ranks(2, _arguments)
    for texts in (first, second):
        assert "process_group" in texts[0]
        assert "mixed_precision" in texts[1]
    assert first[2] != second[2], "the gradient of an ignored parameter travelled"


def _hooked(rank: int) -> int:
    calls: list[int] = []

    def hook(state: object, bucket):  # type: ignore[no-untyped-def]
        calls.append(bucket.buffer().numel())
        return default_hooks.allreduce_hook(None, bucket)

    with pl.init(device="cpu", timeout_s=120):
        model = pl.DataParallel(make_net(), algorithm="ring")
        with pytest.warns(UserWarning, match="replaces"):
            model.register_comm_hook(None, hook)
        _loss(model, rank, 0).backward()
        return sum(calls)


def test_a_hook_of_the_program_replaces_the_exchange() -> None:
    elements = sum(p.numel() for p in make_net().parameters())
    assert run_ranks(2, _hooked) == [elements] * 2
    with pytest.raises(CommError):
        pl.DataParallel(make_net()).register_comm_hook(None, _hooked)


def _closed(rank: int) -> list[str]:
    with mock.patch.dict(os.environ, clear=True):
        early = pl.DataParallel(make_net())
    with pl.init(device="cpu", timeout_s=120):
        model = pl.DataParallel(make_net(), wire="fp16")
        _loss(model, rank, 0).backward()
        with pytest.raises(CommError) as alone:
            _loss(early, rank, 0)
    model.zero_grad()
    with pytest.raises(CommError) as closed:
        _loss(model, rank, 0).backward()
    assert all(p.grad is None for p in model.parameters())
    assert _loss(model.eval(), rank, 0).ndim == 0
    return [str(alone.value), str(closed.value)]


def test_a_model_without_its_group_refuses_to_train() -> None:
    for alone, closed in run_ranks(2, _closed):
        assert "wrapped before a process group existed" in alone
        assert "is closed" in closed


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
     ({"bucket_cap_mb": 0}, "bucket_cap_mb"), ({"plan": "nowhere.toml"}, "cannot be read"),
     ({"plan": "p.toml", "algorithm": "ring"}, "leave one of the two out")],
)  # fmt: skip
def test_mistakes_are_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        pl.DataParallel(make_net(), **options)


def test_wrapping_twice_or_nothing_or_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="already wrapped"):
        pl.DataParallel(pl.DataParallel(make_net()))
    with pytest.raises(ConfigError, match="requires a gradient"):
        pl.DataParallel(make_net().requires_grad_(False))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2" if name != "RANK" else "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(CommError, match=r"paceline\.init"):
        pl.DataParallel(make_net())
