"""Training steps of a tiny net, wired as `training.py` wires them, for the tests of one step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from comm.exchanges import CPU
from comm.exchanges import joined as joined
from paceline.comm import CommSettings, GradientExchange, Group, Transport
from paceline.config import RunConfig
from paceline.core.topology import Topology
from paceline.data import BatchPlan, DataSettings, Normalizer, create_train_loader, open_source
from paceline.optim.settings import OptimSettings
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.plan_file import ClusterFacts
from paceline.precision.policy import LossScale, choose_policy
from paceline.precision.settings import PrecisionSettings
from paceline.train.batch_norm import BatchNormState
from paceline.train.exchange_plan import ChosenPlan, DryBackward, plan_exchange
from paceline.train.micro_step import GradientSource, MicroStep
from paceline.train.step import TrainStep
from paceline.train.step_parts import create_master_optimizer
from paceline.train.stop_signals import StopSignals
from paceline.train.strategy import Synchronous
from paceline.train.weights import create_average, master_weights

DATA = DataSettings(
    source="synthetic", synthetic_samples=29, synthetic_classes=4, image_size=12, channels=1,
    mean=(0.5,), std=(0.25,), eval_resize=0, augment="none", workers=0,
)  # fmt: skip
OPTIM = OptimSettings(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.0, warmup_epochs=0.0)
PRECISION = PrecisionSettings()


class Net(nn.Module):
    """Without batch norm, which contract 1 leaves apart; with dropout where asked for."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(400, 4)
        self.poison = 0.0

    def forward(self, images: Tensor) -> Tensor:
        out = self.fc(self.drop(self.norm(self.conv(images)).relu().flatten(1)))
        return out * (1 + self.poison)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Made:
    """How a step is made: settings that differ from the plain fp32 ones."""

    micro: int = 12
    batch: int = 12
    epochs: int = 1
    dtype: str = "fp32"
    optim: OptimSettings = OPTIM
    precision: PrecisionSettings = PRECISION
    graphs: bool = False
    # None: one flat all-reduce after backward.
    comm: CommSettings | None = None
    # A buffer for every tensor, by this one.
    transport: Transport | None = None
    # How many steps an average of the weights reaches back; 0: none is kept.
    average: float = 0.0


def make_step(
    group: Group, micro: int = 12, model: nn.Module | None = None, *, made: Made | None = None,
    **net: Any,
) -> TrainStep:  # fmt: skip
    """A step over 29 samples in batches of 12: 12, 12, and a short one of 5."""
    made = made or Made(micro)
    torch.manual_seed(3)
    model = (model or Net(**net)).to(group.device)
    plan = BatchPlan(29, made.epochs, made.batch, made.micro, group.world_size)
    loader = create_train_loader(
        open_source(DATA, "train"), plan, DATA, seed=5, rank=group.rank, first_step=0,
        device=torch.device("cpu"),
    )  # fmt: skip
    precision = replace(made.precision, amp_dtype=made.dtype)
    policy = choose_policy(precision, group.device)
    optimizer = create_master_optimizer(made.optim, model, policy, 0.1)
    norms, scale = BatchNormState(model), LossScale(policy, precision)
    normalize = Normalizer(DATA.mean, DATA.std, 1, policy.dtype)
    accumulate = plan.accumulation > 1
    if made.comm is None:
        names = [(name, 1) for name, _ in reversed(list(model.named_parameters()))]
        alone_each = FusionPlan.by_threshold(names, 0) if made.transport else None
        exchange = GradientExchange(
            model.named_parameters(), group, alone_each, accumulate=accumulate,
            transport=made.transport,
        )  # fmt: skip
    else:
        chosen = ChosenPlan.of(made.comm, model, ClusterFacts(group.world_size, 1))
        dry = DryBackward(model, policy, normalize, norms, (made.micro, 12, 12, 1))
        planned = plan_exchange(chosen, group, dry)
        exchange = planned.create(group, accumulate=accumulate, graphs=made.graphs)
    micro_step = MicroStep(
        model, policy, normalize, exchange, scale, 0.1, graphs=made.graphs, model=model
    )
    average = create_average(made.average, 1, model, optimizer, norms)
    strategy = Synchronous(RunConfig(), group)
    parts = SimpleNamespace(
        optimizer=optimizer, exchange=exchange, batch_norm=norms, scale=scale, average=average,
        fast=SimpleNamespace(graphs=made.graphs), clip_norm=made.optim.clip_norm,
    )  # fmt: skip
    strategy.attach(parts, micro_step)  # type: ignore[arg-type]
    return TrainStep(
        model=model, micro=micro_step, strategy=strategy, optimizer=optimizer, exchange=exchange,
        batch_norm=norms, source=GradientSource(),
        loader=loader, normalize=normalize, policy=policy, plan=plan, group=group,
        stop=StopSignals(), scale=scale, seed=5,
    )  # fmt: skip


def alone(device: torch.device = CPU) -> Group:
    return Group(Topology(), CommSettings(), device)


def weights(step: TrainStep) -> Tensor:
    """All masters."""
    masters = master_weights(step.model, step.optimizer)
    return torch.cat([value.flatten() for value in masters.values()]).clone()


def snapshot(step: TrainStep) -> dict[str, Tensor]:
    """All that a step may change: weights as computed with, masters, momenta, statistics."""
    found = {f"model {name}": value for name, value in step.model.state_dict().items()}
    found["masters"] = weights(step)
    for number, state in enumerate(step.optimizer.state.values()):
        found |= {f"{key} {number}": value for key, value in state.items()}
    found["tracked"] = step.batch_norm.tracked
    return {name: value.detach().clone() for name, value in found.items()}


def same(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    """Bit by bit, NaN included."""
    return before.keys() == after.keys() and all(
        before[name].dtype == after[name].dtype
        and torch.equal(before[name].contiguous().view(-1).view(torch.uint8),
                        after[name].contiguous().view(-1).view(torch.uint8))
        for name in before
    )  # fmt: skip


def train(
    group: Group, micro: int = 12, made: Made | None = None, **net: Any
) -> tuple[Tensor, list[float]]:
    """All steps of the plan; masters and losses."""
    step = make_step(group, micro, made=made, **net)
    losses = [step.run(number, 0.1).loss for number in range(step.plan.total_steps)]
    return weights(step), losses
