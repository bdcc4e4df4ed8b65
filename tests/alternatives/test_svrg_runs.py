"""Whole runs with SVRG and HALP: the full gradient, resumes, ranks, refusals."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import paceline as pl
from paceline.core.errors import DataError
from paceline.data import BatchPlan, create_train_loader, open_data
from paceline.train import run_training
from paceline.train.callbacks import Callback, RunControl
from paceline.train.components import Components
from ranks import run_ranks
from refusals import refused
from small_runs import Silent, run_on_ranks, run_small, small_config
from train.runs import newest

FIXED: dict[str, Any] = {
    "optim__name": "halp", "optim__momentum": 0.0, "optim__svrg__mu": 1.0, "data__augment": "none",
    "data__flip": False, "run__batch_size": 8, "optim__warmup_epochs": 0.0, "run__smoothing": 0.0,
}  # fmt: skip


class Linear(nn.Module):
    """A net without batch norm, so that gradients of parts add up to the whole gradient."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.last = nn.Linear(in_channels * 12 * 12, num_classes)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(images.flatten(1))  # type: ignore[no-any-return]


class Watch(Callback):
    """Keeps the optimizer's state after each step."""

    def __init__(self) -> None:
        self.anchors: list[torch.Tensor] = []
        self.full: list[torch.Tensor] = []
        self.weights: list[torch.Tensor] = []

    def on_step(self, run: RunControl, event: Any) -> None:
        optimizer = run._training.step.optimizer
        p = run.model.last.weight
        state = optimizer.state[p]
        self.anchors.append(state["anchor"].clone())
        self.full.append(state["full_gradient"].clone())
        self.weights.append(p.detach().clone())


def watched_run(output: Path, **values: Any) -> Watch:
    watch = Watch()
    config = small_config(output, **{**FIXED, "optim__weight_decay": 0.0, **values})
    run_training(config, Silent, None, Components(model=Linear, callbacks=(watch,)))
    return watch


def on_rank(rank: int, output: str) -> list[Any]:
    watch = watched_run(Path(output), run__global_batch_size=16)
    return [watch.anchors, watch.full, watch.weights]


def test_the_full_gradient_is_that_of_all_samples_on_any_number_of_ranks(tmp_path: Path) -> None:
    """The gradient of a linear model at zero weights has a closed form."""
    config = small_config(tmp_path / "x", **FIXED)
    source, _ = open_data(config.data, None, None)
    once = BatchPlan(56, 1, 56, 56, 1)
    with create_train_loader(
        source, once, config.data, seed=0, rank=0, first_step=0, device=torch.device("cpu")
    ) as loader:
        [batch] = loader
        pixels, labels = batch.images.numpy().copy(), batch.labels.numpy().copy()
    pixels = pixels.transpose(0, 3, 1, 2).reshape(56, -1)
    x = (pixels / 255 - 0.5) / 0.25
    errors = np.full((56, 4), 0.25) - np.eye(4)[labels]
    wanted = errors.T @ x / 56
    alone = watched_run(tmp_path / "alone")
    assert alone.full[0].numpy() == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    # Four steps an epoch of 3.5: one anchor for each four steps.
    assert torch.equal(alone.anchors[0], alone.anchors[3])
    assert torch.equal(alone.anchors[4], alone.weights[3]), "the new anchor is the last weight"
    results = run_ranks(2, on_rank, str(tmp_path / "two"))
    for one, two in zip(results[0], results[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True)), "equal on all ranks"
    assert results[0][1][0].numpy() == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["halp", "svrg"])
def test_a_run_resumes_bit_identically(tmp_path: Path, name: str) -> None:
    """Resumes in the middle of an inner loop."""
    values = FIXED | {
        "optim__name": name, "checkpoint__interval_steps": 1, "checkpoint__keep": 99,
    }  # fmt: skip
    whole = run_small(tmp_path / "a", **values).summary
    for at in (2, 4):
        saved = str(tmp_path / f"a/checkpoints/step-{at:08d}.pt")
        rest = run_small(tmp_path / f"b{at}", run__resume=saved, **values).summary
        assert rest["weights_sha256"] == whole["weights_sha256"], at
        assert rest["top1"] == whole["top1"]


def test_ranks_end_with_the_same_weights(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, tmp_path / "two", FIXED)
    assert first["weights_sha256"] == second["weights_sha256"]
    assert "HALP in 8 bits" in first["chosen"]["optimizer"]
    assert "56 images" in first["chosen"]["full gradient"]
    assert first["state_bytes_per_parameter"] == pytest.approx(9, abs=0.01)
    # One gradient a step, and a full one every four.
    size = 4 * 598_516
    assert first["exchange_bytes_per_step"] == pytest.approx(1.25 * size, rel=0.01)


class Stopped(Linear):
    """Sends SIGTERM to its process in the second batch of the pass before step `before`."""

    before: ClassVar[int] = -1
    at: ClassVar[int] = 0
    passes: ClassVar[int] = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and Stopped.at == Stopped.before:
            Stopped.passes += 1
            if Stopped.passes == 2:
                os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(images)


class Steps(Callback):
    def on_step(self, run: RunControl, event: Any) -> None:
        Stopped.at = event.step


def stopped_run(output: Path, before: int, **values: Any) -> dict[str, Any]:
    """Runs with an anchor every four steps: the pass before step 4 is the second."""
    Stopped.before, Stopped.at, Stopped.passes = before, 0, 0
    config = small_config(output, **FIXED | {"run__global_batch_size": 16} | values)
    done = run_training(config, Silent, None, Components(model=Stopped, callbacks=(Steps(),)))
    return {**done.summary, "by": done.result.stopped_by, "passes": Stopped.passes}


def stop_on_one_rank(rank: int, folder: str) -> list[dict[str, Any]]:
    root = Path(folder)
    whole = stopped_run(root / "a", -1)
    part = stopped_run(root / "b", 4 if rank == 1 else -1)
    rest = stopped_run(root / "c", -1, run__resume=str(root / "b"))
    return [whole, part, rest]


def test_a_signal_to_one_rank_during_a_full_pass_stops_all(tmp_path: Path) -> None:
    results = run_ranks(2, stop_on_one_rank, str(tmp_path))
    for whole, part, rest in results:
        assert part["by"] == "SIGTERM"
        assert rest["weights_sha256"] == whole["weights_sha256"]
    assert results[1][1]["passes"] == 2
    assert newest(tmp_path / "b").name == "step-00000004.pt"


class Streaming(torch.utils.data.IterableDataset[Any]):
    """Has no length and no order."""

    def __iter__(self) -> Any:
        yield from ()


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"data__augment": "pad_crop"}, "data.augment"),
        ({"data__flip": True}, "data.flip"),
        ({"data__cutout": 4}, "data.cutout"),
        ({"data__randaugment": [1, 9]}, "data.randaugment"),
        ({"run__mixup": 0.2}, "run.mixup"),
        ({"run__cutmix": 1.0}, "run.cutmix"),
        ({"precision__amp_dtype": "bf16"}, "precision.amp_dtype"),
        ({"run__strategy": "unequal"}, "run.strategy"),
        ({"comm__wire": "int8"}, "comm.wire"),
        ({"comm__wire": "float16"}, "comm.wire"),
        ({"run__noise_scale": True}, "run.noise_scale"),
    ],
)
def test_refused(tmp_path: Path, values: dict[str, Any], field: str) -> None:
    with refused(field):
        run_small(tmp_path / "a", **FIXED | values)
    assert not (tmp_path / "a").exists()


def test_a_streaming_set_is_refused(tmp_path: Path) -> None:
    """Full gradients need a data set of known length."""
    with pytest.raises(DataError, match="has no length"):
        pl.Trainer("resnet_tiny", Streaming(), optimizer="halp", output=tmp_path / "a").fit()
