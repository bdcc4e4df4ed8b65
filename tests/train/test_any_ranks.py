"""Any number of ranks: ranks have different numbers of micro-batches, or none, in every kind of step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.comm import CommSettings
from paceline.core.errors import ConfigError
from paceline.data import BatchPlan
from paceline.train.batch_norm import BatchNormState, pool
from paceline.train.batch_sizes import resolve_batch_sizes
from paceline.train.checkpoint import Checkpoint
from ranks import run_ranks
from small_runs import run_small
from train.runs import EVERY_STEP
from train.steps import Made, alone, joined, make_step, train, weights
from train.test_batch_norm import _net
from train.test_step import distance
from train.test_step_exchange import HYBRID, RING16


def _steps(rank: int, micro: int, comm: CommSettings | None) -> tuple[Tensor, list[float]]:
    with joined() as group:
        step = make_step(group, made=Made(micro, comm=comm))
        losses = [step.run(number, 0.1).loss for number in range(3)]
        step.exchange.close()
        return weights(step), losses


@pytest.mark.parametrize(
    ("ranks", "micro", "counts"),
    [(2, 4, [2, 1]), (4, 2, [2, 2, 1, 1]), (4, 4, [1, 1, 1, 0]), (3, 12, [1, 0, 0])],
)
@pytest.mark.parametrize("comm", [None, HYBRID, RING16], ids=["flat", "overlapped", "float16"])
def test_ranks_with_unequal_parts_take_the_step_of_one_process(
    ranks: int, micro: int, counts: list[int], comm: CommSettings | None
) -> None:
    """Contract 1, for two full steps and a short one."""
    plan = BatchPlan(29, 1, 12, micro, ranks)
    assert [len(plan.micro_batches(0, rank)) for rank in range(ranks)] == counts
    whole, losses = train(alone())
    results = run_ranks(ranks, _steps, micro, comm)
    for trained, their_losses in results:
        assert torch.equal(trained, results[0][0])
        assert distance(trained, whole) < (2e-3 if comm is RING16 else 1e-5)
        assert their_losses == pytest.approx(losses, rel=1e-3 if comm is RING16 else 1e-5)


def _run(rank: int, output: str, values: dict[str, Any]) -> dict[str, Any]:
    return run_small(output, **values).summary


def _trained(folder: Path) -> dict[str, Tensor]:
    found = load_file(folder / "weights.safetensors")
    return {n: v for n, v in found.items() if "running" not in n and "tracked" not in n}


def _assert_close(ours: Path, theirs: Path) -> None:
    expected = _trained(theirs)
    for name, value in _trained(ours).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4, msg=name)


def test_a_growing_batch_on_ranks_that_do_not_divide_it(tmp_path: Path) -> None:
    """Batches of 8, 16 and 32 in micro-batches of 8: one, two and four of them on three ranks."""
    grows = {
        "run__global_batch_size": 8, "run__batch_size": 8, "run__epochs": 3,
        "optim__batch_schedule": "1:16,2:32",
    }  # fmt: skip
    alone_there = _run(0, str(tmp_path / "alone"), grows)
    three = run_ranks(3, _run, str(tmp_path / "three"), grows)[0]
    assert three["steps"] == alone_there["steps"]
    assert three["chosen"]["batch"] == "8 = 8 × 1 micro-batch on 3 ranks, at most 1 per rank"
    _assert_close(tmp_path / "three", tmp_path / "alone")


def test_a_run_of_four_ranks_resumes_on_three(tmp_path: Path) -> None:
    """The micro-batch was chosen for four ranks and stays, so batch norm sees the same micro-batches."""
    whole = run_ranks(4, _run, str(tmp_path / "whole"), EVERY_STEP)[0]
    assert (whole["batch_size"], whole["accumulation"]) == (4, 1)
    for name in ("first", "second"):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        for path in (tmp_path / name / "checkpoints").glob("step-*.pt"):
            if Checkpoint.read(path).step > 3:
                path.unlink()
        resumed = run_ranks(3, _run, str(tmp_path / name), {"run__resume": "auto"})[0]
        assert (resumed["batch_size"], resumed["accumulation"]) == (4, 2)
        assert resumed["resumed_at_steps"] == [3]
        assert resumed["steps"] == whole["steps"]
        assert resumed["chosen"]["batch"] == "16 = 4 × 4 micro-batches on 3 ranks, 1 or 2 per rank"
    hashes = [
        Checkpoint.read(max((tmp_path / name / "checkpoints").glob("step-*.pt"))).model
        for name in ("first", "second")
    ]
    assert all(torch.equal(value, hashes[1][name]) for name, value in hashes[0].items())
    _assert_close(tmp_path / "first", tmp_path / "whole")


def test_a_batch_of_one_pass_per_rank_is_kept_on_other_ranks(tmp_path: Path) -> None:
    """Without --global-batch-size, the first ranks decide the global batch."""
    own = {"run__batch_size": 4, "run__global_batch_size": None}
    run_ranks(2, _run, str(tmp_path / "a"), own | EVERY_STEP)
    max((tmp_path / "a/checkpoints").glob("step-*.pt")).unlink()
    resumed = run_ranks(3, _run, str(tmp_path / "a"), own | {"run__resume": "auto"})[0]
    assert resumed["global_batch_size"] == 8


def _averages(rank: int, batches: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    with joined() as group:
        torch.manual_seed(0)
        state = BatchNormState(net := _net())
        for number in range(max(batches - rank, 0)):
            torch.manual_seed(10 * rank + number)
            net(torch.randn(4, 3, 2, 2) * (1 + rank) + rank)
        with state.averaged(group):
            inside = state.flat.clone()
        own = state.flat.clone()
        return own, inside, state.rows(group), state.gather_tracked(group)


def test_a_rank_weighs_as_its_batches_in_the_average_of_statistics() -> None:
    """Rank 2 has processed none; its initial statistics must not enter the average."""
    results = run_ranks(3, _averages, 2)
    rows, tracked = results[0][2], results[0][3]
    assert rows is not None
    assert tracked is not None
    assert tracked.tolist() == [[2, 2], [1, 1], [0, 0]]
    mean = (2 * rows[0, 0] + rows[1, 0]) / 3
    assert all(torch.equal(found[1], results[0][1]) for found in results)
    torch.testing.assert_close(results[0][1][0], mean)
    torch.testing.assert_close(pool(rows, tracked), results[0][1])
    state = BatchNormState(_net())
    state.restore(rows, tracked, alone())
    torch.testing.assert_close(state.flat, results[0][1])
    assert state.tracked.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("batch", "ranks", "micro"),
    [(64, 2, 32), (1024, 2, 256), (64, 3, 8), (256, 3, 32), (100, 3, 20), (2, 3, 1), (1, 4, 1)],
)
def test_the_automatic_micro_batch_keeps_ranks_busy(batch: int, ranks: int, micro: int) -> None:
    assert resolve_batch_sizes(batch, None, ranks).micro_batch == micro


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "remedy"),
    [
        (16, 64, 2, "use 64, or --batch-size 8 or 16"),
        (100, 64, 3, "use 64 or 128, or --batch-size 50 or 100"),
        (67, None, 3, "use 66 or 69, or give --batch-size"),
    ],
)
def test_batches_that_cannot_be_divided(
    batch: int, micro: int | None, ranks: int, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_batch_sizes(batch, micro, ranks)
    assert caught.value.field == "run.global_batch_size"
    assert str(caught.value).endswith(remedy)


@pytest.mark.parametrize(
    "strategy", ["synced_norms", "unequal", "asynchronous", "rehearsal"]
)  # fmt: skip
def test_strategies_that_need_equal_parts_say_so(strategy: str, tmp_path: Path) -> None:
    own: dict[str, Any] = {"run__strategy": strategy, "run__batch_size": 8}
    if strategy == "rehearsal":
        own |= {"run__rehearsal__nodes": 3, "run__rehearsal__gpus_per_node": 1}
        found = [_refused(0, str(tmp_path), own)]
    else:
        found = run_ranks(3, _refused, str(tmp_path), own | {"run__synced_norms__ranks": 3})
    assert all("run.global_batch_size = 16: is not a multiple of 24" in line for line in found)


def _refused(rank: int, output: str, values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        run_small(output, **values)
    return str(caught.value)
