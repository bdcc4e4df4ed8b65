"""Batch norm over groups of ranks: against NumPy, against torch on the union, and in whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from paceline.models.synced_norm import NormGroup, SyncedBatchNorm, synchronize_norms
from ranks import run_ranks
from refusals import refused
from small_runs import losses, run_on_ranks, run_small
from train.steps import joined

# Samples of each of four ranks, in two groups of two; rank 3 has a single one.
SIZES = (3, 2, 4, 1)
Float = npt.NDArray[np.float64]


def inputs(rank: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(10 + rank)
    x = torch.randn(SIZES[rank], 3, 4, 5) * (1 + rank) + 50 * (rank % 2)
    return x.to(dtype), torch.randn(SIZES[rank], 3, 4, 5).to(dtype)


def layer() -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(3, momentum=0.3)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 0.5, -2.0]))
        norm.bias.copy_(torch.tensor([0.1, -0.2, 0.3]))
    return norm


def passes(rank: int, form: str = "") -> dict[str, Tensor]:
    """One forward and backward pass in groups of two."""
    with joined() as group:
        shared = NormGroup(2, group.create_subgroup(2, 30.0), active=True)
        net = nn.Sequential(layer())
        assert synchronize_norms(net, shared) == 1
        assert list(net.state_dict()) == list(nn.Sequential(layer()).state_dict())
        x, gradient = inputs(rank)
        if form == "channels_last":
            x = x.contiguous(memory_format=torch.channels_last)
        x.requires_grad_()
        out = net(x)
        out.backward(gradient)
        norm = net[0]
        assert isinstance(norm, SyncedBatchNorm)
        found = {
            "out": out, "x": x.grad, "weight": norm.weight.grad, "bias": norm.bias.grad,
            "mean": norm.running_mean, "var": norm.running_var,
        }  # fmt: skip
        return {name: value.detach().clone() for name, value in found.items()}


def reference(members: tuple[int, ...]) -> dict[str, Float]:
    """The batch norm of the members' union in NumPy."""
    pairs = [inputs(rank) for rank in members]
    x = np.concatenate([a.double().numpy() for a, _ in pairs])
    dy = np.concatenate([b.double().numpy() for _, b in pairs])
    gamma = np.array([1.0, 0.5, -2.0]).reshape(1, 3, 1, 1)
    beta = np.array([0.1, -0.2, 0.3]).reshape(1, 3, 1, 1)
    axes, n = (0, 2, 3), x.size // 3
    mean = x.mean(axes, keepdims=True)
    var = ((x - mean) ** 2).mean(axes, keepdims=True)
    normal = (x - mean) / np.sqrt(var + 1e-5)
    d_beta = dy.sum(axes, keepdims=True)
    d_gamma = (dy * normal).sum(axes, keepdims=True)
    dx = gamma / np.sqrt(var + 1e-5) * (dy - d_beta / n - normal * d_gamma / n)
    return {
        "out": gamma * normal + beta, "x": dx, "weight": d_gamma.ravel(), "bias": d_beta.ravel(),
        "mean": 0.3 * mean.ravel(), "var": 0.7 + 0.3 * var.ravel() * n / (n - 1),
    }  # fmt: skip


@pytest.mark.parametrize("form", ["", "channels_last"])
def test_a_group_computes_the_norm_of_its_union(form: str) -> None:
    found = run_ranks(4, passes, form)
    for members in ((0, 1), (2, 3)):
        wanted = reference(members)
        for name in ("out", "x"):
            joint = torch.cat([found[rank][name] for rank in members]).double().numpy()
            assert joint == pytest.approx(wanted[name], rel=2e-4, abs=2e-4), name
        for name in ("weight", "bias"):  # ranks' shares, which the exchange adds up
            total = sum(found[rank][name].double() for rank in members)
            assert total.numpy() == pytest.approx(wanted[name], rel=1e-4, abs=1e-4), name
        for name in ("mean", "var"):
            one, two = (found[rank][name] for rank in members)
            assert torch.equal(one, two), "bit-identical within a group"
            assert one.double().numpy() == pytest.approx(wanted[name], rel=1e-5), name
    assert not torch.equal(found[0]["mean"], found[2]["mean"])


def test_without_ranks_it_is_torchs_batch_norm() -> None:
    """Half precision computes statistics in fp32. An inactive group has no effect."""
    for dtype, atol in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        x, gradient = inputs(0, dtype)
        results = []
        for group in (
            None,
            NormGroup(1, lambda _: None, active=True),
            NormGroup(1, lambda _: None),
        ):
            norm, own = nn.Sequential(layer()), x.clone().requires_grad_()
            if group is not None:
                synchronize_norms(norm, group)
            out = norm(own)
            out.backward(gradient)
            results.append((out.detach(), own.grad, norm[0].running_var, norm[0].weight.grad))
        for other in results[1:]:
            for one, two in zip(results[0], other, strict=True):
                torch.testing.assert_close(one, two, atol=atol, rtol=atol)
    norm = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm2d(3, affine=False))
    synchronize_norms(norm[0:1], NormGroup(1, lambda _: None, active=True))
    flat = torch.randn(6, 3)
    torch.testing.assert_close(norm[0](flat), nn.BatchNorm1d(3)(flat))
    norm.eval()
    torch.testing.assert_close(norm[0](flat), nn.functional.batch_norm(
        flat, norm[0].running_mean, norm[0].running_var, norm[0].weight, norm[0].bias
    ))  # fmt: skip


GROUPED: dict[str, Any] = {
    "run__batch_size": 4, "run__strategy": "synced_norms", "run__seed": 3,
}  # fmt: skip


def test_two_ranks_train_like_one_with_twice_the_micro_batch(tmp_path: Path) -> None:
    """Two micro-batches of 4 in a group are one of 8, also under accumulation: 16 = 4 · 2 · 2."""
    first, second = run_on_ranks(2, tmp_path / "two", GROUPED)
    run_small(tmp_path / "one", run__batch_size=8, run__seed=3)
    run_small(tmp_path / "apart", run__batch_size=4, run__seed=3)
    assert first["weights_sha256"] == second["weights_sha256"]
    assert "1 group(s) of 2 ranks" in first["chosen"]["synced norms"]
    found, wanted = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert found == pytest.approx(wanted, rel=1e-3)
    assert losses(tmp_path / "apart") != pytest.approx(wanted, rel=1e-3), "statistics matter"


def test_an_uneven_last_step_ends(tmp_path: Path) -> None:
    """54 samples: the last step has 12, three micro-batches for two ranks."""
    uneven = {"data__synthetic_samples": 54, "run__epochs": 2, **GROUPED}
    first, second = run_on_ranks(2, tmp_path / "two", uneven)
    assert first["images"] == 108
    assert first["weights_sha256"] == second["weights_sha256"]


def test_the_statistics_of_the_last_batch(tmp_path: Path) -> None:
    """Training does not read them, evaluation does."""
    plain = run_small(tmp_path / "a").summary
    last = run_small(tmp_path / "b", model__norm_statistics="last").summary
    assert last["weights_sha256"] == plain["weights_sha256"]
    assert last["val_loss"] != plain["val_loss"]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"run__strategy": "synced_norms"}, "run.synced_norms.ranks"),
        ({"run__strategy": "synced_norms", "run__synced_norms__ranks": 1}, "run.synced_norms.ranks"),
        ({"run__strategy": "synced_norms", "run__accel__compile": "model"}, "run.accel.compile"),
        ({"model__norm_statistics": "median"}, "model.norm_statistics"),
        ({"model__norm_statistics": "last", "model__name": "alexnet", "data__image_size": 64},
         "model.norm_statistics"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, values: dict[str, Any], field: str) -> None:
    with refused(field):
        run_small(tmp_path / "a", **values)


@pytest.mark.gpu
def test_on_a_gpu_it_is_torchs_batch_norm() -> None:
    x, gradient = (t.cuda().contiguous(memory_format=torch.channels_last) for t in inputs(0))
    results = []
    for synced in (False, True):
        net, own = nn.Sequential(layer()).cuda(), x.clone().requires_grad_()
        if synced:
            synchronize_norms(net, NormGroup(1, lambda _: None, active=True))
        out = net(own)
        out.backward(gradient)
        results.append((out.detach(), own.grad, net[0].weight.grad))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)
