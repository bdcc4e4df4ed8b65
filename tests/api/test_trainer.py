"""`pl.Trainer`: what it takes, what it returns, and that the command line reads what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import paceline as pl
from api.conftest import trainer
from cli_runs import events, steps
from data_sets import write_folders
from paceline.train.checkpoint import find_checkpoint
from paceline.train.evaluate import evaluate_file
from ranks import run_ranks
from refusals import refused


def test_the_result_is_the_summary_of_the_folder(trained: pl.Trainer) -> None:
    summary = json.loads((trained.folder / "summary.json").read_text())
    again = pl.Trainer.from_config(trained.config)
    assert summary["stopped_by"] == "finished"
    found = again.evaluate()
    assert found.samples > 0
    assert 0 <= found.top1 <= 100


def test_arguments_override_settings_and_recipe(tmp_path: Path) -> None:
    made = pl.Trainer(
        "resnet18", "photos", recipe="cifar10-resnet18", epochs=3, global_batch=64, lr=0.5,
        optimizer="lars", precision="bf16", image_size=48, seed=7, output=tmp_path,
        settings={"run.smoothing": 0.2},
    )  # fmt: skip
    flat = made.config.flat()
    wanted = {
        "model.name": "resnet18", "data.dir": "photos", "data.source": "auto", "run.epochs": 3,
        "run.global_batch_size": 64, "optim.lr": 0.5, "optim.name": "lars", "data.image_size": 48,
        "precision.amp_dtype": "bf16", "run.seed": 7, "run.smoothing": 0.2,
        "run.output": str(tmp_path),
    }  # fmt: skip
    assert {name: flat[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"model": 3}, "model"),
        ({"callbacks": [print]}, "callbacks"),
        ({"epochs": 0}, "run.epochs"),
        ({"settings": {"run.epoch": 3}}, "run.epoch"),
        ({"precision": "fp8"}, "precision.amp_dtype"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], field: str) -> None:
    with refused(field):
        pl.Trainer(**arguments)  # type: ignore[arg-type]


def test_nothing_trained_yet(tmp_path: Path) -> None:
    with pytest.raises(pl.RunError, match="fit"):
        trainer(tmp_path / "none").predict([])


def _fit_and_evaluate(rank: int, output: str) -> tuple[str, float, int]:
    made = trainer(Path(output))
    result = made.fit()
    found = made.evaluate()
    return result.stopped_by, found.top1, found.samples


def test_several_jobs_in_one_program_on_two_ranks(tmp_path: Path) -> None:
    """Training and evaluation meet at the same address, one after the other."""
    first, second = run_ranks(2, _fit_and_evaluate, str(tmp_path / "run"))
    assert first == second
    assert first[0] == "finished"


def test_a_module_holds_its_final_weights_in_fp32(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12 * 12, 4))
    before = net[1].weight.detach().clone()
    made = trainer(tmp_path / "run", model=net, precision="bf16", epochs=1)
    result = made.fit()
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert not torch.equal(net[1].weight, before)
    assert all(p.grad is None for p in net.parameters())
    written = load_file(result.weights)
    assert torch.equal(net[1].weight, written["1.weight"])
    net(torch.zeros(2, 1, 12, 12)).sum().backward()  # no hook of the run is left
    assert made.predict([np.zeros((12, 12), np.uint8)])[0].label
    with pytest.raises(pl.ConfigError, match="Python object"):
        pl.Predictor.load(result.folder)


class TwoOutputs(nn.Module):
    """Features first, scores second; a frozen part; batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(12 * 12, 8)
        self.stem.requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.norm(self.stem(images.flatten(1)))
        return features, self.head(features)


def test_a_module_with_frozen_parts_averages_and_two_outputs(tmp_path: Path) -> None:
    net = TwoOutputs()
    made = trainer(
        tmp_path / "run", model=net, precision="bf16", epochs=2, settings={"run.average_epochs": 1},
        loss=lambda outputs, targets: torch.nn.functional.cross_entropy(
            outputs[1].float(), targets, reduction="none"
        ),
    )  # fmt: skip
    result = made.fit()
    written = load_file(result.weights)
    for name, value in net.state_dict().items():
        assert value.dtype in (torch.float32, torch.int64)
        assert torch.equal(value, written[name]), name
    made.export(tmp_path / "net.pt2")
    program = torch.export.load(tmp_path / "net.pt2").module()
    assert program(torch.zeros(2, 1, 12, 12)).shape == (2, 4)


def test_a_failed_run_leaves_the_module_in_fp32(tmp_path: Path) -> None:
    class Fails(pl.Callback):
        def on_step(self, run: pl.RunControl, event: pl.StepEvent) -> None:
            raise ValueError("stop here")

    net = nn.Sequential(nn.Flatten(), nn.Linear(12 * 12, 4))
    with pytest.raises(pl.PacelineError):
        trainer(tmp_path / "run", model=net, precision="bf16", callbacks=[Fails()]).fit()
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert all(p.grad is None for p in net.parameters())


class Pixels:
    """A dataset whose validation part lacks the last class."""

    def __init__(self, count: int, classes: int) -> None:
        self.targets = [i % classes for i in range(count)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full((12, 12), 40 * self.targets[index], np.uint8), self.targets[index]


def test_a_dataset_with_a_split_is_evaluated_again(tmp_path: Path) -> None:
    settings = {"data.source": "python", "model.num_classes": 6, "data.val_split": 0.25}
    made = trainer(tmp_path / "run", data=Pixels(40, 4), epochs=1, settings=settings)
    made.fit()
    assert made.evaluate().samples == 8
    assert made.evaluate(Pixels(9, 3)).samples == 9
    assert len(made.predict([np.zeros((12, 12), np.uint8)], top=9)[0].labels) == 4


def threefold(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 3 * nn.functional.cross_entropy(outputs, targets, reduction="none")


def test_evaluation_has_the_loss_of_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = trainer(tmp_path / "run", loss=threefold, epochs=1)
    made.fit()
    recorded = events(tmp_path / "run", "eval")[0]["loss"]
    assert made.evaluate().loss == pytest.approx(recorded, rel=1e-5)
    assert "run.loss" not in capsys.readouterr().err
    folder = write_folders(tmp_path / "images", train=8, val=4)
    for name in ("train", "val"):
        for number, letter in enumerate("abcd"):
            (folder / name / letter).rename(folder / name / str(number))
    assert made.evaluate(folder).samples == 4
    assert made.evaluate(folder / "train").samples == 8
    # Another program does not have it, and says so.
    found, _, _ = evaluate_file(find_checkpoint(tmp_path / "run"), {"run.device": "cpu"}, 16)
    assert found.loss == pytest.approx(recorded / 3, rel=1e-5)
    assert "run.loss = python:threefold is not run here" in capsys.readouterr().err


class RaisesLate(nn.Module):
    """On one rank, in its fifth pass of training."""

    rank, passes = 0, 0

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(12 * 12, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        RaisesLate.passes += self.training and torch.is_grad_enabled()
        if RaisesLate.passes == 6 and RaisesLate.rank == 1:
            raise KeyError("sensor 7")
        return self.head(images.flatten(1))


def _fit_late(rank: int, output: str) -> str:
    RaisesLate.rank = rank
    made = trainer(Path(output), model=RaisesLate, epochs=3, settings={"checkpoint.keep": 9})
    try:
        made.fit()
    except pl.RunError as error:
        return str(error)
    return ""


def test_a_model_that_raises_in_mid_run_loses_no_step(tmp_path: Path) -> None:
    first, second = run_ranks(2, _fit_late, str(tmp_path / "run"))
    assert first == second
    assert "rank 1" in first
    assert "sensor 7" in first
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*.pt"))
    assert saved[-1] == f"step-{max(steps(tmp_path / 'run')):08}.pt"
