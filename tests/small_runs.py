"""Small runs for tests: a configuration that trains in a second, and a way to run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cli_runs import events
from paceline.config import RunConfig
from paceline.core.events import Event
from paceline.models import ModelSettings, create_model
from paceline.plan import ClusterFacts, FusionBucket, FusionPlan, ModelFacts, PlanFile
from paceline.plan.wires import own_algorithm
from paceline.train.run import RunOutcome, run_training
from ranks import run_ranks

SMALL: dict[str, Any] = {
    "run.name": "small",
    "run.epochs": 2,
    "run.global_batch_size": 16,
    "run.threads": 1,
    "run.device": "cpu",  # the bit-identical contracts are the CPU's
    "data.source": "synthetic",
    "data.synthetic_samples": 56,
    "data.synthetic_classes": 4,
    "data.image_size": 12,  # starting and saving cost more than the steps
    "data.channels": 1,
    "data.mean": [0.5],
    "data.std": [0.25],
    "data.eval_resize": 0,
    "data.augment": "pad_crop",
    "data.crop_padding": 2,
    "data.workers": 1,
    "model.name": "resnet_tiny",
    "optim.lr": 0.05,
    "optim.warmup_epochs": 0.5,
    "comm.timeout_s": 120.0,
    "comm.rendezvous_timeout_s": 120.0,
}


class Silent:
    """An observer that keeps what it sees."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        """Nothing to close."""


def small_config(output: Path | str, **values: Any) -> RunConfig:
    """SMALL with `section__key=value` laid over it."""
    named = {name.replace("__", "."): value for name, value in values.items()}
    return RunConfig().with_values(SMALL | {"run.output": str(output)} | named)


def run_small(output: Path | str, **values: Any) -> RunOutcome:
    return run_training(small_config(output, **values), Silent)


def summary_on_rank(rank: int, output: str, values: dict[str, Any]) -> dict[str, Any]:
    return run_small(output, **values).summary


def run_on_ranks(ranks: int, output: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    """The summaries of all ranks of one run."""
    return run_ranks(ranks, summary_on_rank, str(output), values)


def tiny_plan(wire: str, folder: Path, ranks: int) -> str:
    """A plan file with all tensors of the small run's model in one bucket."""
    net = create_model(
        ModelSettings(name="resnet_tiny"), num_classes=4, in_channels=1, image_size=12
    )
    sizes = [(name, p.numel()) for name, p in net.named_parameters()]
    own = own_algorithm(wire)
    bucket = FusionBucket(
        tuple(name for name, _ in sizes), own or "native", wire, "ring" if own else ""
    )
    path = folder / "plan.toml"
    PlanFile(FusionPlan((bucket,)), ModelFacts.of(sizes), ClusterFacts(ranks, 1)).write(path)
    return str(path)


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in events(folder, "step")]
