"""Networks among which `recipe = auto` chooses, by cost, and how fast this machine computes them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.core.host import available_cores
from paceline.core.topology import Topology
from paceline.data import BatchPlan, create_train_loader
from paceline.models.settings import STEMS_OF_MODEL
from paceline.train.choices import Situation
from paceline.train.components import Components
from paceline.train.model_checks import make_model
from paceline.train.step_time import measure_step

# Images per second of `Net.cost` 1, of one CPU thread and of an accelerator, if nothing is measured.
_OF_A_THREAD, _OF_AN_ACCELERATOR = 900.0, 150_000.0
_INPUT_BATCH, _INPUT_STEPS = 8, 3
# The measurement of a step ends after this time or number of steps. Steps of small images are short, and
# other processes disturb them.
_LIMIT_S, _STEPS, _CPU_IMAGES, _SMALL_PIXELS = 1.5, 60, 32, 64
# Images up to this size are too small for a first convolution and a pool with stride 2, and the factor by
# which a ResNet without them costs more.
_TINY_PIXELS, _SMALL_STEM = 48, 8.0


@dataclass(frozen=True)
class Net:
    """A network at an image size.

    Attributes:
        model: Value of `model.name`.
        pixels: Image size.
        cost: Time of a training image, in units of the cheapest network.
        visits: Training images, epochs included, from which on the network is better than cheaper ones.
        epochs: Epochs from which on it is better.
    """

    model: str
    pixels: int
    cost: float
    visits: int
    epochs: int

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that choose the network."""
        values = {"model.name": self.model, "data.image_size": self.pixels}
        if "imagenet" in STEMS_OF_MODEL.get(self.model, ()):
            # At 64 pixels, the small stem costs eight times as much.
            values["model.stem"] = "auto" if self.pixels <= _TINY_PIXELS else "imagenet"
        return values

    @property
    def text(self) -> str:
        """The network as text."""
        return f"{self.model} at {self.pixels} pixels"


# Costs are measured on one thread of a server CPU. Visits and epochs are estimates from few trainings.
NETS = (
    Net("resnet_tiny", 32, 1.0, 0, 0),
    Net("resnet_tiny", 48, 2.2, 10_000, 4),
    Net("resnet_tiny", 64, 4.1, 15_000, 6),
    Net("resnet18", 64, 9.2, 25_000, 10),
    Net("resnet18", 96, 16.0, 100_000, 15),
    Net("resnet18", 128, 22.0, 200_000, 20),
    Net("resnet18", 224, 70.0, 500_000, 20),
    Net("resnet50", 224, 150.0, 2_000_000, 30),
)


@dataclass(frozen=True)
class Speed:
    """Training images per second of all ranks.

    Attributes:
        per_s: Images per second.
        origin: The origin of the figure, for messages.
    """

    per_s: float
    origin: str


def nominal_speed(situation: Situation, net: Net) -> Speed:
    """Returns a speed that depends only on the kind of device and the number of threads."""
    if situation.device.type == "cpu":
        threads = situation.threads * situation.ranks
        return Speed(_OF_A_THREAD * threads / net.cost, f"typical for {threads} threads")
    return Speed(_OF_AN_ACCELERATOR * situation.ranks / net.cost, "a careful guess for this device")


def measured_speed(situation: Situation, values: dict[str, Any], classes: int) -> Speed:
    """Measures the step and the input pipeline of one rank with the settings `values`."""
    import torch

    config = settings_with(situation.config, values)
    threads = torch.get_num_threads()
    torch.set_num_threads(situation.threads)
    try:
        with Group(Topology(), config.comm, situation.device) as group:
            model = make_model(config, config.model.num_classes or classes, Components())
            batch = config.run.global_batch_size or 1
            step = measure_step(
                config, model, group, micro_batch=max(1, batch // situation.ranks), classes=classes,
                ranks=situation.ranks, limit_s=_LIMIT_S, steps=_STEPS,
                cpu_images=_CPU_IMAGES if config.data.image_size <= _SMALL_PIXELS else 8,
            )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    image_s = step.images_s / step.images + step.update_s * situation.ranks / batch
    input_s = _input_s(situation, config)
    if situation.device.type == "cpu":  # decoding takes cores from the steps
        image_s += input_s / max(1, available_cores() // situation.ranks)
    else:
        image_s = max(image_s, input_s / config.data.workers)
    return Speed(situation.ranks / image_s, "measured")


def settings_with(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    """Returns settings with `values`, for measurements."""
    return config.with_values({"run.minutes": None, "run.strategy": "synchronous", **values})


def _input_s(situation: Situation, config: RunConfig) -> float:
    """Returns the seconds of one thread to read, decode and augment an image."""
    data = replace(config.data, workers=0, cache="none", resident="off")
    count = min(_INPUT_BATCH, len(situation.source))
    plan = BatchPlan(len(situation.source), 1, count, count, 1)
    steps = min(_INPUT_STEPS, plan.total_steps)
    with create_train_loader(
        situation.source, plan, data, seed=0, rank=0, first_step=0, device=situation.device
    ) as loader:
        started = time.perf_counter()
        for _ in range(steps):
            next(loader)
        return (time.perf_counter() - started) / (steps * count)


def allowed_nets(situation: Situation) -> list[Net]:
    """Returns the networks that the user's flags allow, the cheapest first.

    A model that is not in the table has the cost of the nearest one, as its speed is measured.
    """
    given = situation.given
    model = given.get("model.name", "given in Python" if situation.own_model else None)
    pixels = given.get("data.image_size")
    if pixels is not None and (not isinstance(pixels, int) or pixels < 1):
        raise ConfigError("data.image_size", pixels, "must be at least 1", "try 64")
    nets = [net for net in NETS if model is None or net.model == model]
    if not nets:
        own = situation.config.model.name
        nets = [
            replace(net, model=own, visits=0, epochs=0) for net in NETS if net.model == "resnet18"
        ]
    if pixels is not None:
        nets = [_at(net, pixels) for net in _nearest(nets, pixels)]
    return sorted(nets, key=lambda net: net.cost)


def _nearest(nets: list[Net], pixels: int) -> list[Net]:
    """Returns one network of each model, with the image size nearest to `pixels`."""
    best: dict[str, Net] = {}
    for net in nets:
        other = best.get(net.model)
        if other is None or abs(net.pixels - pixels) < abs(other.pixels - pixels):
            best[net.model] = net
    return list(best.values())


def _at(net: Net, pixels: int) -> Net:
    stem = (
        _SMALL_STEM if pixels <= _TINY_PIXELS < net.pixels and net.model != "resnet_tiny" else 1.0
    )
    return replace(net, pixels=pixels, cost=net.cost * stem * (pixels / net.pixels) ** 2)
