from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.train import Checkpoint
from paceline.train.batch_norm import BatchNormState, pool
from ranks import run_ranks
from small_runs import run_small
from train.runs import last
from train.steps import alone, joined


def _net() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(3, momentum=1.0), nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5))


def _images(rank: int) -> Tensor:
    torch.manual_seed(100 + rank)
    return torch.randn(4, 3, 2, 2) * (1 + rank) + rank


def _average(rank: int) -> tuple[Tensor, Tensor, Tensor | None]:
    with joined() as group:
        torch.manual_seed(0)
        net = _net()
        state = BatchNormState(net)
        net(_images(rank))
        own = state.flat.clone()
        with state.averaged(group):
            inside = state.flat.clone()
        assert torch.equal(state.flat, own)
        return own, inside, state.rows(group)


def test_a_pass_over_all_samples_leaves_the_statistics_alone(tmp_path: Path) -> None:
    """That of the full gradient of SVRG, before the first step of each epoch."""
    fixed = {"data__augment": "none", "data__flip": False, "optim__momentum": 0.0}
    run_small(tmp_path / "run", optim__name="svrg", run__batch_size=16, **fixed)
    batches = last(tmp_path / "run").batch_norm["tracked"]
    assert set(batches.flatten().tolist()) == {7}, "one a step"


def test_the_average_is_that_of_the_whole_population() -> None:
    results = run_ranks(2, _average)
    owns = torch.stack([own for own, _, _ in results])
    assert torch.equal(results[0][1], results[1][1])
    torch.testing.assert_close(results[0][1], pool(owns))
    rows = results[0][2]
    assert torch.equal(rows, owns)
    assert results[1][2] is None
    # Layer 0 has momentum 1, so its statistics are those of the batch, and the batches of both ranks
    # form one population of known moments. running_var is unbiased over 16 values.
    union = torch.cat([_images(0), _images(1)]).transpose(0, 1).flatten(1)
    torch.testing.assert_close(results[0][1][0, :3], union.mean(1))
    biased = owns[:, :, :3].clone()
    biased[:, 1] *= 15 / 16
    torch.testing.assert_close(pool(biased)[1], union.var(1, unbiased=False))


def test_the_model_reads_and_writes_the_flat_buffer() -> None:
    net, reference = _net(), _net()
    reference.load_state_dict(net.state_dict())
    state = BatchNormState(net)
    images = torch.randn(4, 3, 6, 6)
    assert torch.equal(net(images), reference(images))
    for name, value in reference.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name
    assert state.flat.shape == (2, 8)
    assert state.tracked.tolist() == [1, 1]


def test_a_step_is_undone_if_the_flag_is_set() -> None:
    net = _net()
    state = BatchNormState(net)
    net(torch.randn(4, 3, 6, 6))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state.remember()
    net(torch.full((4, 3, 6, 6), float("nan")))
    state.discard_if(torch.tensor(0.0))
    assert state.flat.isnan().any()
    state.discard_if(torch.tensor(1.0))
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_restoring_on_another_number_of_ranks_uses_the_average() -> None:
    rows = torch.rand(3, 2, 8)
    state = BatchNormState(_net())
    state.restore(rows[:1], torch.tensor([7, 7]), alone())
    assert torch.equal(state.flat, rows[0])
    state.restore(rows, torch.tensor([9, 9]), alone())
    assert torch.equal(state.flat, pool(rows))
    assert state.tracked.tolist() == [9, 9]


def test_a_model_without_batch_norm() -> None:
    state = BatchNormState(nn.Linear(2, 2))
    state.remember()
    state.discard_if(torch.tensor(1.0))
    with state.averaged(alone()):
        assert state.flat.numel() == 0


def _averaging(rank: int, output: str, resume: str = "") -> tuple[str, float]:
    summary = run_small(
        output, run__resume=resume, run__batch_size=8, run__average_epochs=1.0,
        checkpoint__batch_norm="average", checkpoint__interval_steps=3, checkpoint__keep=99,
    ).summary  # fmt: skip
    return summary["weights_sha256"], summary["val_loss"]


def test_a_checkpoint_of_the_average_has_one_row_and_resumes_to_the_bit(tmp_path: Path) -> None:
    """Weights and evaluations, though the ranks' own statistics are not in it."""
    whole = run_ranks(2, _averaging, str(tmp_path / "whole"))
    saved = tmp_path / "whole/checkpoints/step-00000003.pt"
    found = Checkpoint.read(saved)
    assert found.batch_norm["rows"].shape[0] == 1
    assert found.average["rows"].shape[0] == 1
    assert run_ranks(2, _averaging, str(tmp_path / "rest"), str(saved)) == whole
    ends = [last(tmp_path / name).batch_norm["rows"] for name in ("whole", "rest")]
    assert torch.equal(*ends)
