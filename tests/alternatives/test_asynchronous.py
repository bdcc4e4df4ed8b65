"""Asynchronous SGD: the server's arithmetic and the bound on staleness against plain NumPy, and whole
runs."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cli_runs import events
from comm.exchanges import joined
from paceline.alternatives.asynchronous.parameter_server import (
    Clock,
    ParameterServer,
    cut_shards,
)
from paceline.config import RunConfig
from paceline.core.errors import PacelineError
from paceline.train import run_training
from paceline.train.components import Components
from ranks import run_ranks
from refusals import refused
from small_runs import Silent, run_on_ranks, small_config
from train.runs import AtStep, last

SIZES = (5, 300, 20, 70)
ROUNDS, RATE, MOMENTUM = 12, 0.1, 0.5


def test_shards_hold_each_tensor_once_and_are_even() -> None:
    for ranks, servers in ((4, 0), (4, 1), (3, 2), (2, 7)):
        shards = cut_shards(SIZES, ranks, servers)
        assert len(shards) == min(servers or ranks, ranks)
        assert sorted(n for shard in shards for n in shard.tensors) == [0, 1, 2, 3]
        assert shards[-1].stop == sum(SIZES)
        for shard in shards:
            assert shard.stop - shard.start == sum(SIZES[n] for n in shard.tensors)


class Momentum:
    """The optimizer of a shard: v ← m v + g; w ← w − lr v. Logs the gradients."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights, self.velocity = weights, torch.zeros_like(weights)
        self.log: list[np.ndarray] = []

    def __call__(self, gradient: torch.Tensor, rate: float) -> bool:
        if not torch.isfinite(gradient).all():
            return False
        self.log.append(gradient.numpy().copy())
        self.velocity.mul_(MOMENTUM).add_(gradient)
        self.weights.sub_(rate * self.velocity)
        return True


def _work(rank: int, servers: int, bound: int) -> dict[str, Any]:
    """Runs workers of different speed."""
    with joined() as group:
        shards = cut_shards(SIZES, group.world_size, servers)
        server, clock = ParameterServer(group, shards), Clock()
        own = next((shard for shard in shards if shard.rank == rank), None)
        applied = None
        if own is not None:
            applied = Momentum(torch.ones(own.stop - own.start))
            server.serve(applied.weights, applied)
        flat = torch.zeros(sum(SIZES))
        waits: list[Any] = []
        staleness, refused = [], 0
        draw = random.Random(rank)
        for step in range(ROUNDS):
            server.pull(flat)
            time.sleep(draw.random() * 0.01 * (1 + rank))
            gradient = flat * 0.1 + float(rank + step)
            if rank == 1 and step == 3:
                gradient[0] = torch.nan
            found = server.push(gradient, RATE)
            staleness.append(found.staleness)
            refused += found.refused
            row = torch.zeros(group.world_size)
            row[rank] = 1.0
            waits.append((clock.tick(row), row))
            # As the loop does: at most `bound` steps are not known to be done by all.
            while len(waits) > bound:
                wait, done = waits.pop(0)
                wait()
                assert done.tolist() == [1.0] * group.world_size
        for wait, _ in waits:
            wait()
        server.pull(flat)
        server.close()
        log = [] if applied is None else applied.log
        span = None if own is None else (own.start, own.stop)
        return {
            "flat": flat.numpy().copy(), "staleness": staleness, "refused": refused, "log": log,
            "span": span,
        }  # fmt: skip


@pytest.mark.parametrize(("servers", "bound"), [(0, 2), (1, 0)])
def test_servers_apply_every_push_once_and_staleness_is_bounded(servers: int, bound: int) -> None:
    ranks = 3
    found = run_ranks(ranks, _work, servers, bound)
    final = np.zeros(sum(SIZES), np.float32)
    for result in found:
        np.testing.assert_array_equal(result["flat"], found[0]["flat"])
        if result["span"] is None:
            continue
        # The weights of a shard follow from the order in which its server was given gradients.
        weights = np.ones(result["span"][1] - result["span"][0], np.float32)
        velocity = np.zeros_like(weights)
        for gradient in result["log"]:
            velocity = np.float32(MOMENTUM) * velocity + gradient
            weights = weights - np.float32(RATE) * velocity
        final[slice(*result["span"])] = weights
        assert len(result["log"]) in (ranks * ROUNDS - 1, ranks * ROUNDS)
    np.testing.assert_allclose(found[0]["flat"], final, rtol=1e-5)
    assert sum(result["refused"] for result in found) == 1
    staleness = [s for result in found for s in result["staleness"]]
    # Between a pull and its push another rank does at most 2 · bound + 1 steps.
    assert max(staleness) <= (2 * bound + 1) * (ranks - 1)


# Whole runs.

ASYNC: dict[str, Any] = {"run__strategy": "asynchronous", "run__asynchronous__staleness": 1}


@pytest.mark.parametrize(
    "values",
    [{}, {"run__asynchronous__servers": 1, "optim__name": "lars", "precision__amp_dtype": "bf16"}],
)
def test_a_run_trains_evaluates_and_resumes(tmp_path: Path, values: dict[str, Any]) -> None:
    own = ASYNC | values | {"checkpoint__interval_steps": 3, "checkpoint__keep": 9}
    first, second = run_on_ranks(2, tmp_path / "a", own)
    assert first["weights_sha256"] == second["weights_sha256"]
    assert first["steps"] == 7
    assert first["exchange_state_bytes"] > 0
    assert "asynchronous" in first["chosen"]["exchange"]
    steps = events(tmp_path / "a", "step")
    assert [event["step"] for event in steps] == list(range(1, 8))
    for event in steps[:-1]:
        assert sum(event["staleness"].values()) == 2
        assert all(int(stale) <= 3 for stale in event["staleness"])
    assert len(events(tmp_path / "a", "eval")) == 2
    assert all(event["exposed_comm_s"] > 0 for event in steps)
    saved = tmp_path / "a/checkpoints/step-00000003.pt"
    again = run_on_ranks(2, tmp_path / "b", own | {"run__resume": str(saved)})[0]
    assert again["resumed_at_steps"] == [3]
    assert again["steps"] == 7
    # A synchronous run can go on from its checkpoint, with its momenta.
    plain = {
        key: value for key, value in own.items() if "asynchronous" not in (value, *key.split("__"))
    }
    other = run_on_ranks(2, tmp_path / "c", plain | {"run__resume": str(saved)})[0]
    assert other["steps"] == 7
    if not values:
        sent = first["exchange_bytes_per_step"] / other["exchange_bytes_per_step"]
        assert sent == pytest.approx(2, rel=0.02), "weights come, and gradients go"
    assert first["top1"] is not None


def test_norms_of_muon_come_back_from_the_servers(tmp_path: Path) -> None:
    own = {"optim__name": "muon", "optim__muon__steps": "fixed", "run__epochs": 1}
    run_on_ranks(2, tmp_path, ASYNC | {"run__asynchronous__servers": 1} | own)
    states = last(tmp_path).optimizer["state"].values()
    references = [float(s["reference_norm"]) for s in states if "reference_norm" in s]
    assert references
    assert min(references) > 0


def _stopped(rank: int, output: str) -> str:
    config = small_config(output, run__epochs=4, **ASYNC)
    return run_training(config, lambda: AtStep(3)).result.stopped_by


def test_a_stop_ends_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    """All ranks know the signal of one rank within the bound; begun steps are completed and saved."""
    assert run_ranks(2, _stopped, str(tmp_path / "a")) == ["SIGTERM"] * 2
    saved = last(tmp_path / "a")
    assert 4 <= saved.step <= 6
    rest = run_on_ranks(2, tmp_path / "a", ASYNC | {"run__epochs": 4, "run__resume": "auto"})
    assert rest[0]["steps"] == 14
    assert rest[0]["weights_sha256"] == rest[1]["weights_sha256"]


class Broken(nn.Module):
    """A model that fails in a step on one rank."""

    def __init__(self, rank: int, num_classes: int) -> None:
        super().__init__()
        self._rank, self._calls = rank, 0
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(12 * 12, num_classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled() and images.abs().sum() > 0:
            self._calls += 1
        if self._calls > 8 and self._rank == 1:
            raise ValueError("a broken layer")
        return self.net(images)


def _broken(rank: int, output: str) -> str:
    config = small_config(output, run__epochs=20, **ASYNC)
    made = Components(model=lambda num_classes: Broken(rank, num_classes))
    try:
        run_training(config, Silent, components=made)
    except PacelineError as error:
        return str(error)
    return ""


def test_an_error_of_one_rank_ends_all_with_its_line(tmp_path: Path) -> None:
    first, second = run_ranks(2, _broken, str(tmp_path))
    assert "a broken layer" in first
    assert "a broken layer" in second


def test_without_momentum_and_staleness_it_follows_synchronous_sgd(tmp_path: Path) -> None:
    """Two pushes at half the rate are nearly one step: the second sees the effect of the first."""
    values = {"optim__momentum": 0.0, "optim__lr": 1e-4, "optim__weight_decay": 0.1}
    own = {"run__strategy": "asynchronous", "run__asynchronous__staleness": 0}
    ours = run_on_ranks(2, tmp_path / "a", values | own)[0]
    theirs = run_on_ranks(2, tmp_path / "b", values)[0]
    assert abs(ours["val_loss"] - theirs["val_loss"]) < 2e-3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("comm.algorithm", "hierarchical"), ("comm.overlap", "on"), ("comm.wire", "int8"),
        ("comm.group_size", 2), ("comm.plan", "plan.toml"),
        ("run.average_epochs", 1.0), ("optim.clip_norm", 1.0), ("run.asynchronous.staleness", -1),
        ("optim.name", "rmsprop_warmup"), ("precision.amp_dtype", "fp16"),
    ],
)  # fmt: skip
def test_what_excludes_asynchronous_training_is_refused(name: str, value: object) -> None:
    with refused(name):
        RunConfig().with_values({"run.strategy": "asynchronous", name: value})


def test_classes_and_objects_are_no_optimizers_of_servers(tmp_path: Path) -> None:
    values = {"run.strategy": "asynchronous", "optim.name": "torch.optim:SGD", "optim.lr": 0.1}
    with refused("optim.name"):
        RunConfig().with_values(values)
    own = Components(optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    with refused("optimizer"):
        run_training(small_config(tmp_path / "a", **ASYNC), Silent, components=own)
    assert not (tmp_path / "a").exists()
