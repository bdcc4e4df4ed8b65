"""Models of timm and torchvision on a GPU with a run's defaults: fp16, torch.compile, CUDA graphs; and
models that cannot be captured."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.user_net import UserNet, loss_of_both
from paceline.core.errors import PacelineError
from paceline.core.events import NoteEvent, StartEvent, StepEvent
from paceline.train import run_training
from paceline.train.components import Components
from paceline.train.micro_step import Captured, CaptureError
from small_runs import Silent, small_config

pytestmark = [
    pytest.mark.gpu,
    # Packages warn about one another, and the compiler about itself.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]
COLOUR: dict[str, Any] = {
    "data__image_size": 64, "data__channels": 3, "data__mean": [0.5] * 3, "data__std": [0.25] * 3,
    "data__crop_padding": 4, "data__synthetic_samples": 160, "run__epochs": 4,
    "run__global_batch_size": 32, "run__device": "cuda", "optim__name": "sgd", "optim__lr": 0.02,
    "run__smoothing": 0.0, "data__workers": 2,
}  # fmt: skip
ZOO = [
    "timm:convnext_atto", "timm:vit_tiny_patch16_224", "timm:efficientnet_b0",
    "torchvision:mobilenet_v3_small", "torchvision:vgg11_bn", "torchvision:densenet121",
]  # fmt: skip


def train(
    output: Path, components: Components | None = None, **values: Any
) -> tuple[dict[str, str], list[float], list[str]]:
    """Trains and returns the choices, losses and notes."""
    shown = Silent()
    config = small_config(output, **COLOUR | values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_training(config, lambda: shown, components=components)
    (start,) = [event for event in shown.events if isinstance(event, StartEvent)]
    losses = [event.loss for event in shown.events if isinstance(event, StepEvent)]
    notes = [event.text for event in shown.events if isinstance(event, NoteEvent)]
    return start.chosen, losses, notes


def check_losses(losses: list[float]) -> None:
    assert len(losses) == 20
    assert all(math.isfinite(loss) for loss in losses)
    assert mean(losses[-5:]) < mean(losses[:5])


@pytest.mark.parametrize("name", ZOO)
def test_a_model_of_a_zoo_trains_with_the_defaults(tmp_path: Path, name: str) -> None:
    pytest.importorskip(name.partition(":")[0])
    chosen, losses, notes = train(tmp_path / "run", model__name=name)
    check_losses(losses)
    assert chosen["model"].startswith(name)
    assert chosen["precision"].startswith("fp16")
    assert (
        chosen["speed"]
        == "NHWC, fused norms off (this model has none), compile model, CUDA graphs on"
    )
    assert not [note for note in notes if "captured" in note]


def test_a_users_module_with_several_outputs_is_captured(tmp_path: Path) -> None:
    net = UserNet(4, in_channels=3, several=True)
    chosen, losses, notes = train(tmp_path / "run", Components(model=net, loss=loss_of_both))
    check_losses(losses)
    assert "CUDA graphs on" in chosen["speed"]
    assert not [note for note in notes if "captured" in note]


class Waits(nn.Module):
    """A net that decides on the host by a computed value."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.ReLU(), nn.Dropout(), nn.Flatten())
        self.head = nn.Linear(8 * 64, 4)

    def forward(self, images: Tensor) -> Tensor:
        features = self.body(images)
        if features.float().mean().item() > 1e9:
            features = features * 2
        return self.head(features)


@pytest.mark.parametrize("compiled", ["auto", "off"])
def test_a_model_that_waits_for_the_device_is_not_captured(tmp_path: Path, compiled: str) -> None:
    """Dropout draws outside of a capture afterwards."""
    net = Components(model=Waits())
    chosen, losses, notes = train(tmp_path / "run", net, run__accel__compile=compiled)
    check_losses(losses)
    assert "CUDA graphs on" in chosen["speed"]
    assert [note for note in notes if "steps are not captured from here on" in note]
    with pytest.raises(PacelineError, match="run.cuda_graphs=off"):
        train(tmp_path / "on", Components(model=Waits()), run__cuda_graphs="on")


def test_after_a_failed_capture_the_device_works(tmp_path: Path) -> None:
    """Stream, allocator and random generator work."""
    value = torch.ones(1000, device="cuda")
    out = torch.zeros(1000, device="cuda")

    def wait() -> None:
        out.copy_(torch.nn.functional.dropout(value, 0.5))
        if torch.cuda.is_current_stream_capturing():
            value.sum().item()

    captured = Captured(wait, enabled=True, pool=torch.cuda.graph_pool_handle())
    stream = torch.cuda.current_stream()
    for _ in range(2):
        captured()
    with pytest.raises(CaptureError):
        captured()
    captured.release()
    assert torch.cuda.current_stream() == stream
    torch.manual_seed(1)
    first = torch.nn.functional.dropout(value, 0.5)
    torch.manual_seed(1)
    assert torch.equal(first, torch.nn.functional.dropout(value, 0.5))
    again = Captured(lambda: out.copy_(torch.rand(1000, device="cuda")), enabled=True)
    for _ in range(4):
        again()
    assert out.std() > 0.1


def test_a_model_that_cannot_be_compiled_runs_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(model: nn.Module, **how: object) -> Any:
        def forward(images: Tensor) -> Tensor:
            raise torch._dynamo.exc.InternalTorchDynamoError("no such operator")

        return forward

    monkeypatch.setattr(torch, "compile", broken)
    net = UserNet(4, in_channels=3, several=False)
    chosen, losses, _ = train(tmp_path / "run", Components(model=net))
    check_losses(losses)
    expected = "compile off (torch.compile failed: no such operator), CUDA graphs on"
    assert expected in chosen["speed"]
