"""Own loops on a GPU: nothing waits for the device, ranks that share it, CUDA's random numbers."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from custom_loop.nets import batch, flat, gradients, make_net
from no_waiting import no_waiting
from paceline.core.errors import PacelineError
from paceline.train.checkpoint import content_hash
from ranks import run_ranks

pytestmark = pytest.mark.gpu


def _train(prepared: pl.Prepared, model: nn.Module, rank: int, steps: range) -> list[Any]:
    losses = []
    for step in steps:
        images, labels = (tensor.cuda() for tensor in batch(rank, step))
        with prepared.autocast():
            loss = F.cross_entropy(model(images).float(), labels)
        prepared.backward(loss)
        prepared.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("name", ["lars", "sgd", "muon"])
def test_nothing_waits_for_the_device(name: str) -> None:
    net = make_net().cuda().to(memory_format=torch.channels_last)
    prepared = pl.prepare(net, name, lr=0.05, clip_norm=1.0)
    assert prepared.precision == "fp16"
    images, labels = (tensor.cuda() for tensor in batch(0, 0))
    losses = []
    for step in range(30):
        with no_waiting() if step > 2 else nullcontext():
            with prepared.autocast():
                loss = F.cross_entropy(prepared.model(images).float(), labels)
            prepared.backward(loss)
            prepared.step()
        losses.append(loss.detach())
    assert float(losses[-1]) < float(losses[0])
    assert float(prepared.overflow) == 0


def _shared(rank: int, folder: Path, stop: int, wire: str | None) -> tuple[Any, ...]:
    """Two ranks share the GPU over Gloo; dropout draws from CUDA's generator."""
    torch.backends.cudnn.deterministic = True
    with pl.init(backend="gloo", device="cuda", timeout_s=60) as context:
        prepared = pl.prepare(make_net(rank, dropout=0.5).to(context.device), "lars", lr=0.5)
        model = pl.DataParallel(prepared.model, wire=wire)
        torch.manual_seed(10 + rank)
        checkpointer = pl.Checkpointer(folder)
        start = checkpointer.restore(prepared=prepared)
        _train(prepared, model, rank, range(start or 0, stop))
        checkpointer.save(stop, prepared=prepared)
        state = prepared.state_dict()
        state["optimizer"] = state["optimizer"]["state"]
        return start, flat(prepared.model).cpu(), content_hash(state), torch.cuda.initial_seed()


@pytest.mark.parametrize("wire", [None, "fp16"])
def test_ranks_that_share_a_gpu_resume_exactly(wire: str | None, tmp_path: Path) -> None:
    whole = run_ranks(2, _shared, tmp_path / "a", 6, wire, timeout_s=110)
    run_ranks(2, _shared, tmp_path / "b", 3, wire)
    parts = run_ranks(2, _shared, tmp_path / "b", 6, wire)
    assert torch.equal(whole[0][1], whole[1][1])
    for resumed, straight in zip(parts, whole, strict=True):
        assert (straight[0], resumed[0]) == (None, 3)
        assert resumed[2] == straight[2]


def _against_ddp(rank: int) -> list[bool]:
    with pl.init(backend="gloo", device="cuda", timeout_s=60) as context:
        seen = []
        for wrap in (DistributedDataParallel, pl.DataParallel):
            torch.backends.cudnn.deterministic = True
            net = make_net(rank).to(context.device)
            model = wrap(net)
            images, labels = batch(rank, 0)
            F.cross_entropy(model(images.cuda()), labels.cuda()).backward()
            seen.append(gradients(net))
            del model, net
        return [torch.equal(seen[0][name], seen[1][name]) for name in seen[0]]


def test_gradients_have_the_bits_of_ddp() -> None:
    for equal in run_ranks(2, _against_ddp, timeout_s=110):
        assert all(equal)


def _nccl(rank: int) -> tuple[Any, ...]:
    with pl.init(timeout_s=60) as context:
        context.barrier()
        prepared = pl.prepare(make_net().to(context.device), "lars", lr=0.5)
        model = pl.DataParallel(prepared.model)
        losses = _train(prepared, model, rank, range(4))
        return context.backend, str(context.device), bool(torch.isfinite(torch.stack(losses)).all())


def test_a_rank_of_a_launcher_uses_nccl() -> None:
    assert run_ranks(1, _nccl, timeout_s=110) == [("nccl", "cuda:0", True)]


def _too_many(rank: int) -> str:
    with pytest.raises(PacelineError) as caught:
        pl.init(timeout_s=30)
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs one GPU")
def test_more_nccl_ranks_than_gpus_are_refused_on_all_ranks() -> None:
    for text in run_ranks(2, _too_many, timeout_s=110):
        assert 'backend="gloo"' in text
        assert "\n" not in text
