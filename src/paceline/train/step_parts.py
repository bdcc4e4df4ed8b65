"""Builds the training step of a model from precision, optimizer, gradient exchange and fast path.

`create_parts` chooses each part and makes all ranks agree on the choice. If one rank fails or chooses
differently, all ranks end with an error of one line, before a collective of different sizes could hang.
`create_step` creates the `TrainStep`. Training and benchmarks build their steps here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from paceline.comm.exchange import GradientExchange
from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.data import BatchAugment, BatchPlan, Normalizer, TrainBatches
from paceline.models.acceleration import Forward
from paceline.models.registry import count_norms, is_own, parameter_groups
from paceline.optim.base import MasterOptimizer
from paceline.optim.build import create_optimizer, describe_layers, with_layer_decay
from paceline.optim.orthogonal import SharedProducts
from paceline.optim.settings import OptimSettings
from paceline.plan.plan_file import PlanFile
from paceline.precision.policy import LossScale, Policy, allow_tf32, choose_policy
from paceline.train.batch_norm import BatchNormState
from paceline.train.components import Components
from paceline.train.exchange_plan import (
    ChosenPlan,
    DryBackward,
    check_wires,
    count_nodes,
    describe_exchange,
    measured_constants,
    plan_exchange,
)
from paceline.train.fast_path import (
    AllRanks,
    FastPath,
    ModelLimits,
    choose_fast_path,
    triton_problem,
)
from paceline.train.loss import CrossEntropy, Mixing, OwnLoss, TrainingLoss, create_loss
from paceline.train.micro_step import GradientSource, MicroStep
from paceline.train.model_checks import with_one_output
from paceline.train.run_state import PinnedPlan
from paceline.train.step import TrainStep
from paceline.train.stop_signals import StopSignals
from paceline.train.strategy import Strategy, Synchronous
from paceline.train.weights import WeightAverage, create_average, fingerprint


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """The model, optimizer, gradient exchange and other parts of a training step, without the data.

    Attributes:
        exchange_summary: Description of the exchange for display; "" on one rank.
        measured_summary: What the choice of the exchange is based on, if it was measured.
        dry: Runs the forward and backward pass of a micro-batch of zeros.
    """

    model: nn.Module
    policy: Policy
    optimizer: MasterOptimizer
    batch_norm: BatchNormState
    scale: LossScale
    strategy: Strategy
    exchange: GradientExchange
    fast: FastPath
    normalize: Normalizer
    plan_file: PlanFile
    exchange_summary: str
    measured_summary: str
    loss: TrainingLoss
    dry: DryBackward
    clip_norm: float = 0.0
    average: WeightAverage | None = None

    def probe(self) -> None:
        """Runs one micro-batch without any effect on training, so that a caller can measure its time."""
        self.dry()
        self.model.zero_grad(set_to_none=True)

    def describe(self) -> dict[str, str]:
        """Describes how a step is computed, by name, for display and for the record."""
        clipped = f"gradients clipped to a norm of {self.clip_norm:g}" if self.clip_norm else ""
        notes = (self.optimizer.describe(), describe_layers(self.optimizer.param_groups), clipped)
        chosen = {
            "precision": f"{self.policy.name}, loss scale {self.scale.describe()}",
            "optimizer": ", ".join(filter(None, notes)),
            "speed": self.fast.describe(),
            "exchange": self.exchange_summary,
            "exchange measured": self.measured_summary,
        }
        if not isinstance(self.loss, CrossEntropy):
            chosen["loss"] = self.loss.describe()
        return chosen


def create_parts(
    config: RunConfig, model: nn.Module, group: Group, *, rate: float, micro_batch: int,
    accumulate: bool, pinned: PinnedPlan | None = None, steps_per_epoch: float = 1.0,
    components: Components | None = None, classes: int | None = None,
    limits: ModelLimits = ModelLimits(), strategy: Strategy | None = None,
) -> StepParts:  # fmt: skip
    """Creates the parts of a training step, and rounds the weights in place. All ranks call this.

    Args:
        config: The settings of the run.
        model: The model on its device, with fp32 weights.
        group: The ranks.
        rate: Learning rate of the first step.
        micro_batch: Number of samples in a micro-batch.
        accumulate: True if a step has several micro-batches.
        pinned: The fusion plan of the checkpoint, if a run is resumed.
        steps_per_epoch: Number of steps in an epoch, for `run.average_epochs`.
        components: Python objects that replace objects that the settings name.
        classes: Number of classes, which a user's loss needs if images are mixed.
        limits: Properties of the model that rule out faster implementations.
        strategy: The training strategy. The default is `Synchronous`.

    Returns:
        The parts, which are the same on all ranks.

    Raises:
        PacelineError: If a part cannot be created on any rank.
    """
    components = components or Components()
    settings = config.optim
    strategy = strategy or Synchronous(config, group)
    cluster = strategy.cluster(config, group.world_size, count_nodes(group))
    constants = measured_constants(config, group, strategy, pinned)
    with group.phase("training parts") as same:
        problem = triton_problem(group.device)
        same.compare({"Triton": problem or "usable"}, "use the same image on all nodes")
        policy = choose_policy(config.precision, group.device)
        allow_tf32(config.precision)
        if problem and settings.fused == "auto":
            settings = replace(settings, fused="foreach")
        optimizer = create_master_optimizer(
            settings, model, policy, rate, components.optimizer, config.run.seed
        )
        loss = create_loss(config.run, components.loss, classes)
        if optimizer.rule.has_products or optimizer.path == "torch":
            here = {"the computing device": _computing_device(group.device)}
            same.compare(here, "use one kind of device and as many threads everywhere, or use lars")
        batch_norm = strategy.batch_norm(model)
        fast = choose_fast_path(
            config.run, model, group.device, problem, dtype=policy.dtype, limits=limits,
            shared_gpu=config.comm.share_gpus and group.world_size > 1,
        )  # fmt: skip
        if group.world_size > 1:  # 0.1 s for the weights of a ResNet-50
            remedy = "use the same --pretrained file and versions"
            same.compare({"initial weights": fingerprint(model)}, remedy)
        chosen = ChosenPlan.of(config.comm, model, cluster, pinned, constants.file)
        same.compare(chosen.facts(), "build the same model on every rank")
    dry = _create_dry(config, model, policy, batch_norm, loss, fast, problem, micro_batch)
    fast = _try_model(config, model, group, fast, dry)
    dry = replace(dry, forward=fast.forward)
    # All ranks agree on the configuration, so all of them raise the same errors from here.
    if strategy.same_weights:
        share_products(config, optimizer, group, fast.graphs)
    planned = plan_exchange(chosen, group, dry)
    check_wires(config, planned.plan, planned.origin)
    exchange = strategy.create_exchange(
        planned, accumulate=accumulate, graphs=fast.graphs, squares=config.run.noise_scale
    )
    scale = LossScale(policy, config.precision, fp16_travels=planned.fp16_travels)
    if (memory := exchange.memory) is not None:
        memory.scale = scale.step_value
    average = create_average(
        config.run.average_epochs, steps_per_epoch, model, optimizer, batch_norm
    )
    return StepParts(
        model=model, policy=policy, optimizer=optimizer, batch_norm=batch_norm, scale=scale,
        strategy=strategy, exchange=exchange, fast=fast, normalize=dry.normalize, plan_file=planned.file,
        exchange_summary=describe_exchange(exchange, planned, fast), measured_summary=constants.note,
        average=average, loss=loss, dry=dry, clip_norm=settings.clip_norm,
    )  # fmt: skip


def _create_dry(
    config: RunConfig, model: nn.Module, policy: Policy, batch_norm: BatchNormState,
    loss: TrainingLoss, fast: FastPath, kernel_problem: str, micro_batch: int,
) -> DryBackward:  # fmt: skip
    normalize = Normalizer(
        config.data.mean, config.data.std, config.data.channels, policy.dtype,
        channels_out=fast.image_channels, channels_last=config.run.channels_last,
        kernel=not kernel_problem,
    )  # fmt: skip
    size, channels = config.data.image_size, config.data.channels
    return DryBackward(
        fast.forward, policy, normalize, batch_norm, (micro_batch, size, size, channels), loss,
        None if is_own(model) else model, advise=fast.advise,
    )  # fmt: skip


def _try_model(
    config: RunConfig, model: nn.Module, group: Group, fast: FastPath, dry: DryBackward
) -> FastPath:
    """Tests model and loss on images of zeros; returns a fast path that works on all ranks.

    For a user's model, the returned forward pass yields only the logits, unless the loss accepts all
    outputs.
    """
    foreign = not is_own(model)
    one_output = foreign and not isinstance(dry.loss, OwnLoss)

    def trial(forward: Forward) -> bool:
        replace(dry, forward=with_one_output(forward) if one_output else forward)()
        model.zero_grad(set_to_none=True)
        return True

    if not isinstance(dry.loss, CrossEntropy):
        mixes = bool(config.run.mixup or config.run.cutmix)
        eager = replace(
            dry, forward=with_one_output(model) if one_output else model,
            normalize=dry.normalize.without_padding(),
        )  # fmt: skip
        group.agree_on("loss on a batch", lambda: eager.check_loss(model, mixes=mixes))
    if fast.applied is not None:
        # If an automatic choice fails with this model, all ranks drop it, and the description shows it.
        fast.applied.calibrate(AllRanks(group), trial, foreign=foreign)
        fast = replace(fast, forward=fast.applied.forward)
    if foreign:
        # Needed even if the order of the gradients is known: the backward pass may fail.
        group.agree_on("first pass", lambda: trial(fast.forward))
    return replace(fast, forward=with_one_output(fast.forward)) if one_output else fast


def share_products(
    config: RunConfig, optimizer: MasterOptimizer, group: Group, graphs: bool
) -> None:
    """Divides the matrix products of Muon's update among the ranks if `share_products` allows it.

    On CPUs, the results are bit-identical to those of a rank that computes all products itself.

    Args:
        config: The settings of the run.
        optimizer: The optimizer whose products are divided.
        group: The ranks.
        graphs: True if the update is captured as a CUDA graph.

    Raises:
        ConfigError: If the setting is `on` and the backend cannot be captured.
    """
    wanted = config.optim.own_optimizer.share_products
    if not optimizer.rule.has_products or group.world_size == 1 or wanted == "off":
        return
    if config.comm.min_ranks:
        return  # an update must not fail after a part of it, as it could if another rank is lost
    cuda = group.device.type == "cuda"
    if cuda and group.backend != "nccl" and graphs:
        if wanted == "on":
            raise ConfigError(
                f"optim.{config.optim.name}.share_products", "on",
                f"{group.backend} cannot be captured in the CUDA graph of the update",
                "use comm.backend = 'nccl', or --set run.cuda_graphs=off",
            )  # fmt: skip
        return
    if wanted == "auto" and cuda and (group.backend != "nccl" or config.comm.share_gpus):
        return  # ranks that use the same GPU gain nothing from dividing the work
    optimizer.shared = SharedProducts(group.rank, group.world_size, group.gather_rows)


def _computing_device(device: torch.device) -> str:
    """Describes the properties of a device that influence the last bits of a matrix product.

    Ranks must not share products if these properties differ, because their weights would silently
    differ.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.backends.cpu.get_cpu_capability()} with {torch.get_num_threads()} threads"


def create_step(
    config: RunConfig, parts: StepParts, loader: TrainBatches, plan: BatchPlan, group: Group,
    stop: StopSignals, components: Components | None = None,
    source: GradientSource | None = None,
) -> TrainStep:  # fmt: skip
    """Creates the training step from its parts.

    Args:
        config: The settings of the run.
        parts: The parts of the step.
        loader: Yields the micro-batches of this rank.
        plan: Divides the samples of the run into steps and micro-batches.
        group: The ranks.
        stop: Requests to stop or save.
        components: Python objects that replace objects that the settings name.
        source: Computes the gradients. The default runs one backward pass per micro-batch.
    """
    graphs = parts.fast.graphs
    augment = None
    if components is not None and components.device_augment is not None:
        augment = BatchAugment(components.device_augment, config.data.channels)
    micro = MicroStep(
        parts.fast.forward, parts.policy, parts.normalize, parts.exchange, parts.scale,
        config.run.smoothing, graphs=graphs, must_capture=config.run.cuda_graphs == "on",
        loss=parts.loss, augment=augment, advise=parts.fast.advise, model=parts.model,
    )  # fmt: skip
    parts.strategy.attach(parts, micro)
    run = config.run
    mixing = None
    if run.mixup or run.cutmix:
        mixing = Mixing(run.mixup, run.cutmix, config.data.image_size, run.seed)
    step = TrainStep(
        model=parts.model,
        micro=micro,
        strategy=parts.strategy,
        optimizer=parts.optimizer,
        exchange=parts.exchange,
        batch_norm=parts.batch_norm,
        loader=loader,
        normalize=parts.normalize,
        policy=parts.policy,
        plan=plan,
        group=group,
        stop=stop,
        scale=parts.scale,
        seed=run.seed,
        mixing=mixing,
        foreign=not is_own(parts.model),
        source=source or GradientSource(),
        checks_parameters=not is_own(parts.model) or bool(components and components.callbacks),
    )
    # An abort must destroy CUDA graphs before the process groups whose collectives they contain.
    group.release_on_abort(step.release)
    return step


def create_master_optimizer(
    settings: OptimSettings, model: nn.Module, policy: Policy, rate: float,
    factory: Callable[..., Any] | None = None, seed: int = 0,
) -> MasterOptimizer:  # fmt: skip
    """Rounds the model's weights to the policy's format and creates an optimizer with fp32 masters.

    Args:
        settings: The section `[optim]`.
        model: The model, with fp32 weights.
        policy: The number format to which the matrix weights are rounded.
        rate: Learning rate of the first step.
        factory: Creates a user's optimizer from parameter groups; None for a named optimizer.
        seed: Seed of the optimizer's random numbers.

    Returns:
        The optimizer. The masters are the weights before rounding.

    Raises:
        ConfigError: If the optimizer does not contain all trained parameters.
    """
    groups = parameter_groups(model, settings.weight_decay)
    if settings.decay_bias_norm:
        groups = [{**group, "weight_decay": settings.weight_decay} for group in groups]
    groups = with_layer_decay(groups, model, settings.layer_decay)
    drawn = {p: p.detach().clone() for group in groups for p in group["params"]}
    policy.convert(model)
    optimizer = create_optimizer(settings, groups, rate, factory, seed, count_norms(model))
    # In the order of the optimizer, which may have regrouped the parameters.
    parameters = optimizer.parameters()
    if len(parameters) != len(drawn):
        raise ConfigError(
            "optimizer", None, f"contains {len(parameters)} of the {len(drawn)} trained parameters",
            "pass it all parameter groups; freeze parameters with requires_grad_(False)",
        )  # fmt: skip
    for master, parameter in zip(optimizer.masters(), parameters, strict=True):
        if master is not parameter:
            master.detach().copy_(drawn[parameter])
    return optimizer
