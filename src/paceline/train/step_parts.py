"""`StepParts`: what a training step is made of, for a model that is there already.

In: the configuration, a model on its device and the group. Out: precision, optimizer on masters,
exchange, loss scale and fast path, settled among all ranks; and the `TrainStep` itself. Training and
benchmark build their steps here, so that one measures what the other runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from paceline.comm.gradient_exchange import GradientExchange
from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.data.batch_plan import BatchPlan
from paceline.data.loader_protocol import TrainBatches
from paceline.data.normalize import Normalizer
from paceline.models.registry import parameter_groups
from paceline.optim.build import create_optimizer
from paceline.optim.lars import LARS
from paceline.optim.settings import OptimSettings
from paceline.plan.plan_file import PlanFile
from paceline.precision.policy import LossScale, Policy, allow_tf32, choose_policy
from paceline.train.batch_norm import BatchNormState
from paceline.train.dry_backward import DryBackward
from paceline.train.exchange_parts import describe_exchange, plan_exchange
from paceline.train.fast_path import FastPath, choose_fast_path
from paceline.train.micro_step import MicroStep
from paceline.train.mixing import Mixing
from paceline.train.pinned_plan import PinnedPlan
from paceline.train.step import TrainStep
from paceline.train.stop_signals import StopSignals
from paceline.train.triton_probe import triton_problem
from paceline.train.update import Update
from paceline.train.weights import WeightAverage, create_average


@dataclass(frozen=True)
class StepParts:
    """Everything but data and plan."""

    model: nn.Module
    policy: Policy
    optimizer: LARS
    batch_norm: BatchNormState
    scale: LossScale
    exchange: GradientExchange
    fast: FastPath
    normalize: Normalizer
    plan_file: PlanFile
    exchange_words: str
    average: WeightAverage | None = None

    def describe(self) -> dict[str, str]:
        """What was chosen, for display and record."""
        return {
            "precision": f"{self.policy.name}, loss scale {self.scale.describe()}",
            "optimizer": f"{type(self.optimizer).__name__.lower()}, {self.optimizer.path}",
            "speed": self.fast.describe(),
            "exchange": self.exchange_words,
        }


def create_parts(
    config: RunConfig, model: nn.Module, group: Group, *, rate: float, micro_batch: int,
    accumulate: bool, pinned: PinnedPlan | None = None, steps_per_epoch: float = 1.0,
) -> StepParts:  # fmt: skip
    """Rounds the model to its number format, switches its fast forms on, and plans the exchange.
    `steps_per_epoch` says how far the average of `run.average_epochs` reaches back."""
    problem = triton_problem(group.device)
    facts = {"Triton": problem or "usable"}
    group.settle("kernels", facts=facts, remedy="use the same image on all nodes")
    policy = group.settled("precision", lambda: choose_policy(config.precision, group.device))
    allow_tf32(config.precision)
    settings = config.optim
    if problem and settings.fused == "auto":
        settings = replace(settings, fused="foreach")
    optimizer = group.settled(
        "optimizer", lambda: create_master_optimizer(settings, model, policy, rate)
    )
    if settings.name == "muon":
        remedy = "muon wants one kind of device and as many threads everywhere; or use lars"
        group.settle("products", facts={"what computes": _computes(group.device)}, remedy=remedy)
    batch_norm = BatchNormState(model)
    shared = config.comm.share_gpus and group.world_size > 1
    fast = group.settled(
        "speed",
        lambda: choose_fast_path(config.run, model, group.device, problem, shared_gpu=shared),
    )
    normalize = Normalizer(
        config.data.mean, config.data.std, config.data.channels, policy.dtype,
        channels_out=fast.image_channels, channels_last=config.run.channels_last,
        kernel=not problem,
    )  # fmt: skip
    size, channels = config.data.image_size, config.data.channels
    dry = DryBackward(
        fast.forward, policy, normalize, batch_norm, (micro_batch, size, size, channels)
    )
    planned = plan_exchange(config.comm, model, group, dry, pinned)
    exchange = planned.create(group, accumulate=accumulate, graphs=fast.graphs)
    scale = LossScale(policy, config.precision, fp16_travels=planned.fp16_travels)
    words = describe_exchange(exchange, planned, _when(exchange, fast))
    # Refused alike on all ranks, which have agreed on the configuration.
    average = create_average(
        config.run.average_epochs, steps_per_epoch, model, optimizer, batch_norm
    )
    return StepParts(
        model, policy, optimizer, batch_norm, scale, exchange, fast, normalize, planned.file, words,
        average,
    )  # fmt: skip


def _computes(device: torch.device) -> str:
    """What the last bits of a product of matrices depend on. All ranks make the same products; were
    they to differ, so would the weights, more with every step, and nobody would be told."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.backends.cpu.get_cpu_capability()} with {torch.get_num_threads()} threads"


def _when(exchange: GradientExchange, fast: FastPath) -> str:
    """At which moment the buffers leave."""
    if not exchange.overlaps:
        return "after backward"
    if fast.compile == "model":
        return "overlapped (of little use: compiled as a whole, backward gives all at its end)"
    if not fast.graphs:
        return "overlapped"
    recordable = exchange.carrier.recordable
    return f"overlapped, {'in the recording' if recordable else 'last micro-step not recorded'}"


def create_step(
    config: RunConfig, parts: StepParts, loader: TrainBatches, plan: BatchPlan, group: Group,
    stop: StopSignals,
) -> TrainStep:  # fmt: skip
    graphs = parts.fast.graphs
    micro = MicroStep(
        parts.fast.forward, parts.policy, parts.normalize, parts.exchange, parts.scale,
        config.run.smoothing, graphs=graphs,
    )  # fmt: skip
    update = Update(
        parts.model, parts.optimizer, parts.exchange, parts.batch_norm, parts.scale, graphs=graphs,
        average=parts.average,
    )  # fmt: skip
    run = config.run
    mixing = None
    if run.mixup or run.cutmix:
        mixing = Mixing(run.mixup, run.cutmix, config.data.image_size, run.seed)
    step = TrainStep(
        parts.model, micro, update, parts.exchange, parts.batch_norm, loader, parts.normalize,
        parts.policy, plan, group, stop, parts.scale, run.seed, mixing,
    )  # fmt: skip
    group.release_on_abort(step.release)
    return step


def create_master_optimizer(
    settings: OptimSettings, model: nn.Module, policy: Policy, rate: float
) -> LARS:
    """Rounds the model's weights to the policy's format; the masters keep them as they were drawn."""
    groups = parameter_groups(model, settings.weight_decay)
    if settings.decay_bias_norm:
        groups = [{**group, "weight_decay": settings.weight_decay} for group in groups]
    drawn = {p: p.detach().clone() for group in groups for p in group["params"]}
    policy.convert(model)
    optimizer = create_optimizer(settings, groups, rate)
    # The optimizer's own order: it may have groups of its own.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for master, parameter in zip(optimizer.masters(), parameters, strict=True):
        master.detach().copy_(drawn[parameter])
    return optimizer
