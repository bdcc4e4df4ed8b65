"""Runs on a Dataset, with own augmentation: exact on resume, and all ranks fail alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_sets import write_folders
from paceline.core.errors import CheckpointError, PacelineError, RunError
from paceline.data import DatasetSource
from paceline.train import run_training
from paceline.train.components import Components
from paceline.train.evaluate import evaluate_file
from ranks import run_ranks
from small_runs import Silent, small_config

SETTINGS: dict[str, Any] = {
    "data__source": "auto", "data__val_split": 0.25, "data__image_size": 16,
    "checkpoint__interval_steps": 1, "checkpoint__keep": 9,
}  # fmt: skip


class Levels:
    """Images of one level each, that tells the class."""

    classes = ("low", "mid", "high")
    targets = tuple(i % 3 for i in range(48))

    def __init__(self, broken: Callable[[int], bool] = lambda i: False) -> None:
        self.broken = broken
        self.reads = 0

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        self.reads += 1
        if self.reads > 60 and self.broken(i):
            raise LookupError(f"shelf {i}")
        return np.full((20, 18 + i % 3), 80 * (i % 3) + i, np.uint8), i % 3


def noisy(image: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    return np.clip(image + chance.normal(0, 9, image.shape), 0, 255).astype(np.uint8)


def shaken(batch: torch.Tensor) -> torch.Tensor:
    return batch + 0.05 * torch.randn_like(batch)


def trained(output: Path, dataset: Any = None, **values: Any) -> Any:
    given = {name: values.pop(name, None) for name in ("augment", "device_augment")}
    components = Components(train_data=DatasetSource(dataset or Levels()), **given)
    return run_training(small_config(output, **(SETTINGS | values)), Silent, components=components)


def test_a_dataset_trains_and_resumes_exactly(tmp_path: Path) -> None:
    own = {"augment": noisy, "device_augment": shaken}
    whole = trained(tmp_path / "whole", **own).summary
    assert whole["chosen"]["data"] == "Levels, 36 training and 12 validation images, 3 classes"
    assert "data.val_split = 0.25: 12 of 48" in whole["chosen"]["input"]
    assert "augment, device augment" in whole["chosen"]["given in Python"]
    saved = str(tmp_path / "whole/checkpoints/step-00000002.pt")
    rest = trained(tmp_path / "rest", run__resume=saved, **own).summary
    assert rest["weights_sha256"] == whole["weights_sha256"]
    without = trained(tmp_path / "without", augment=noisy).summary
    assert without["weights_sha256"] != whole["weights_sha256"]
    with pytest.raises(CheckpointError, match=r"data.val_split = 0.25, but this run has 0.5"):
        trained(tmp_path / "other", run__resume=saved, data__val_split=0.5)


def _one_rank_breaks(rank: int, output: str) -> str:
    try:
        trained(Path(output), Levels(lambda i: rank == 1), run__batch_size=4)
    except PacelineError as error:
        return str(error)
    return "no error"


def test_a_dataset_that_fails_on_one_rank_ends_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, _one_rank_breaks, str(tmp_path / "run"))
    assert "raised LookupError: shelf" in second
    assert second in first, "with the other's line"


def test_the_split_of_a_run_is_of_its_own_data_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = write_folders(tmp_path / "all", train=48).joinpath("train").rename(tmp_path / "photos")
    run_training(small_config(tmp_path / "run", **SETTINGS, data__dir=str(photos)), Silent)
    saved = tmp_path / "run/checkpoints/best.pt"

    def samples(folder: Path, **more: object) -> tuple[int, str]:
        overrides = {"data.dir": str(folder), "data.source": "auto", **more}
        result, _, _ = evaluate_file(saved, overrides, 8)
        return result.samples, capsys.readouterr().err

    with_validation = write_folders(tmp_path / "other", train=20, val=8)
    assert samples(with_validation) == (8, "")
    count, said = samples(with_validation / "train")
    assert count == 20
    assert "no validation set: all of its 20 images are evaluated" in said
    assert samples(with_validation / "train", **{"data.val_split": 0.4})[0] == 8
    # The training data keeps its split, at its place and at another one.
    assert samples(photos)[0] == 12
    count, said = samples(photos.rename(tmp_path / "moved"))
    assert count == 12
    assert "is the training data: data.val_split = 0.25" in said


@pytest.mark.gpu
def test_augmentation_in_a_cuda_graph_draws_anew_in_every_step(tmp_path: Path) -> None:
    logs = []
    for number in range(2):
        log = torch.zeros(64, device="cuda")

        def shake(batch: torch.Tensor, log: torch.Tensor = log) -> torch.Tensor:
            assert batch.shape[1] == 1
            noise = torch.randn_like(batch)
            log.copy_(log.roll(1))
            log[0] = noise.float().sum()
            return batch + 0.05 * noise

        values = {"run__device": "cuda", "run__cuda_graphs": "on", "run__epochs": 6}
        trained(tmp_path / str(number), device_augment=shake, **values)
        logs.append(log.cpu())
    drawn = logs[0][logs[0] != 0]
    assert len(drawn) >= 10
    assert len(drawn.unique()) == len(drawn)
    assert torch.equal(*logs)


@pytest.mark.gpu
def test_augmentation_that_cannot_be_captured(tmp_path: Path) -> None:
    values = {"run__device": "cuda", "run__epochs": 6}

    def waits(batch: torch.Tensor) -> torch.Tensor:
        return batch * batch.max().item()

    with pytest.raises(RunError, match="could not be captured as a CUDA graph"):
        trained(tmp_path / "on", device_augment=waits, run__cuda_graphs="on", **values)
    assert trained(tmp_path / "auto", device_augment=waits, **values).summary["steps"] > 6
