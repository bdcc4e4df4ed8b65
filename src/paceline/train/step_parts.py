"""Builds the training step of a model: precision, optimizer, exchange, loss scale, fast path.

`create_parts` chooses each part and makes all ranks agree on it: what one rank cannot do, or does
differently, ends all ranks with one line before the first collective that it would break. `create_step`
makes the `TrainStep`. Training and benchmarks both build their steps here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.exchange import GradientExchange, tensor_spec
from paceline.comm.group import Group
from paceline.comm.plan_choice import PlanChoice, agree_order, record_order
from paceline.comm.settings import CommSettings
from paceline.comm.transport import create_transport
from paceline.config import RunConfig
from paceline.core.errors import CheckpointError, ConfigError, RunError
from paceline.core.imports import first_line
from paceline.core.units import format_bytes
from paceline.data import BatchAugment, BatchPlan, Normalizer, TrainBatches
from paceline.models.registry import is_own, parameter_groups
from paceline.optim.base import MasterOptimizer
from paceline.optim.build import create_optimizer
from paceline.optim.layers import describe_layers, with_layer_decay
from paceline.optim.muon import Muon
from paceline.optim.orthogonal import SharedProducts
from paceline.optim.settings import OptimSettings
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.plan_file import ClusterFacts, Expected, ModelFacts, PlanFile
from paceline.precision.policy import LossScale, Policy, allow_tf32, choose_policy
from paceline.train.components import Components
from paceline.train.fast_path import (
    FastPath,
    Forward,
    choose_fast_path,
    triton_problem,
    try_fast_path,
)
from paceline.train.loss import CrossEntropy, OwnLoss, TrainingLoss, check_gradient, create_loss
from paceline.train.machine import explain_out_of_memory
from paceline.train.micro_step import MicroStep, Mixing, step_error
from paceline.train.model_checks import restored_buffers, with_one_output
from paceline.train.run_state import PinnedPlan
from paceline.train.step import TrainStep
from paceline.train.stop_signals import StopSignals
from paceline.train.update import Update
from paceline.train.weights import BatchNormState, WeightAverage, create_average


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Everything a step needs but data and batch plan."""

    model: nn.Module
    policy: Policy
    optimizer: MasterOptimizer
    batch_norm: BatchNormState
    scale: LossScale
    exchange: GradientExchange
    fast: FastPath
    normalize: Normalizer
    plan_file: PlanFile
    exchange_summary: str
    loss: TrainingLoss
    clip_norm: float = 0.0
    average: WeightAverage | None = None

    def describe(self) -> dict[str, str]:
        """What was chosen, for display and record."""
        clipped = f"gradients clipped to a norm of {self.clip_norm:g}" if self.clip_norm else ""
        notes = (self.optimizer.describe(), describe_layers(self.optimizer.param_groups), clipped)
        chosen = {
            "precision": f"{self.policy.name}, loss scale {self.scale.describe()}",
            "optimizer": ", ".join(filter(None, notes)),
            "speed": self.fast.describe(),
            "exchange": self.exchange_summary,
        }
        if not isinstance(self.loss, CrossEntropy):
            chosen["loss"] = self.loss.describe()
        return chosen


def create_parts(
    config: RunConfig, model: nn.Module, group: Group, *, rate: float, micro_batch: int,
    accumulate: bool, pinned: PinnedPlan | None = None, steps_per_epoch: float = 1.0,
    components: Components | None = None, classes: int | None = None,
) -> StepParts:  # fmt: skip
    """Rounds the model to its number format, switches its fast forms on, and plans the exchange.
    `steps_per_epoch` says how far the average of `run.average_epochs` reaches back, `classes` how many
    there are for an own loss of mixed images."""
    components = components or Components()
    problem = triton_problem(group.device)
    facts = {"Triton": problem or "usable"}
    group.agree("kernels", facts=facts, remedy="use the same image on all nodes")
    policy = group.agree_on("precision", lambda: choose_policy(config.precision, group.device))
    allow_tf32(config.precision)
    settings = config.optim
    if problem and settings.fused == "auto":
        settings = replace(settings, fused="foreach")
    optimizer = group.agree_on(
        "optimizer",
        lambda: create_master_optimizer(settings, model, policy, rate, components.optimizer),
    )
    loss = group.agree_on("loss", lambda: create_loss(config.run, components.loss, classes))
    if isinstance(optimizer, Muon) or optimizer.path == "torch":
        own = isinstance(optimizer, Muon)
        name = type(optimizer).__name__.lower() if own else "this optimizer"
        remedy = f"{name} wants one kind of device and as many threads everywhere; or use lars"
        group.agree("products", facts={"what computes": _computes(group.device)}, remedy=remedy)
    batch_norm = BatchNormState(model)
    shared = config.comm.share_gpus and group.world_size > 1
    fast = group.agree_on(
        "speed",
        lambda: choose_fast_path(config.run, model, group.device, problem, shared_gpu=shared),
    )
    normalize = Normalizer(
        config.data.mean, config.data.std, config.data.channels, policy.dtype,
        channels_out=fast.image_channels, channels_last=config.run.channels_last,
        kernel=not problem,
    )  # fmt: skip
    size, channels = config.data.image_size, config.data.channels
    foreign = not is_own(model)
    one_output = foreign and not isinstance(loss, OwnLoss)
    dry = DryBackward(
        fast.forward, policy, normalize, batch_norm, (micro_batch, size, size, channels), loss,
        model if foreign else None,
    )  # fmt: skip

    def trial(forward: Forward, guard: AbstractContextManager[None] | None = None) -> bool:
        replace(dry, forward=with_one_output(forward) if one_output else forward)(guard)
        model.zero_grad(set_to_none=True)
        return True

    if not isinstance(loss, CrossEntropy):
        mixes = bool(config.run.mixup or config.run.cutmix)
        eager = replace(dry, forward=with_one_output(model) if one_output else model)
        group.agree_on("loss on a batch", lambda: eager.check_loss(model, mixes=mixes))
    fast = try_fast_path(config.run, fast, model, group, trial, foreign=foreign)
    if foreign:
        # Also where the order of the gradients is known: its backward pass may fail.
        group.agree_on("first pass", lambda: trial(fast.forward))
    if one_output:
        fast = replace(fast, forward=with_one_output(fast.forward))
    dry = replace(dry, forward=fast.forward)
    group.agree_on("shared products", lambda: share_products(config, optimizer, group, fast.graphs))
    planned = plan_exchange(config.comm, model, group, dry, pinned)
    exchange = planned.create(
        group, accumulate=accumulate, graphs=fast.graphs, squares=config.run.noise_scale
    )
    scale = LossScale(policy, config.precision, fp16_travels=planned.fp16_travels)
    # Refused alike on all ranks, which have agreed on the configuration.
    average = create_average(
        config.run.average_epochs, steps_per_epoch, model, optimizer, batch_norm,
        settings.schedule_free,
    )  # fmt: skip
    return StepParts(
        model=model,
        policy=policy,
        optimizer=optimizer,
        batch_norm=batch_norm,
        scale=scale,
        exchange=exchange,
        fast=fast,
        normalize=normalize,
        plan_file=planned.file,
        exchange_summary=describe_exchange(exchange, planned, _when(exchange, fast)),
        average=average,
        loss=loss,
        clip_norm=settings.clip_norm,
    )


def share_products(
    config: RunConfig, optimizer: MasterOptimizer, group: Group, graphs: bool
) -> bool:
    """Lets the ranks share Muon's products out, where `optim.share_products` says so; whether they do.
    Shared or not, the results have the same bits on CPUs."""
    wanted = config.optim.share_products
    if not isinstance(optimizer, Muon) or group.world_size == 1 or wanted == "off":
        return False
    cuda = group.device.type == "cuda"
    if cuda and group.backend != "nccl" and graphs:
        if wanted == "on":
            raise ConfigError(
                "optim.share_products", "on",
                f"{group.backend} cannot be captured in the CUDA graph of the update",
                "use comm.backend = 'nccl', or --set run.cuda_graphs=off",
            )  # fmt: skip
        return False
    if wanted == "auto" and cuda and (group.backend != "nccl" or config.comm.share_gpus):
        return False  # ranks of one GPU have nothing to share
    optimizer.shared = SharedProducts(group.rank, group.world_size, group.gather_rows)
    return True


def _computes(device: torch.device) -> str:
    """What the last bits of a matrix product depend on. All ranks compute the same products; if these
    differed, so would the weights, more with every step, and unnoticed."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.backends.cpu.get_cpu_capability()} with {torch.get_num_threads()} threads"


def _when(exchange: GradientExchange, fast: FastPath) -> str:
    """When buckets are sent."""
    if not exchange.overlaps:
        return "after backward"
    if fast.compile == "model":
        return "overlapped (of little use: compiled as a whole, backward yields all gradients at its end)"
    if not fast.graphs:
        return "overlapped"
    if exchange.transport.capturable:
        return "overlapped, in the CUDA graph"
    return "overlapped, last micro-step not captured"


def create_step(
    config: RunConfig, parts: StepParts, loader: TrainBatches, plan: BatchPlan, group: Group,
    stop: StopSignals, components: Components | None = None,
) -> TrainStep:  # fmt: skip
    graphs = parts.fast.graphs
    augment = None
    if components is not None and components.device_augment is not None:
        augment = BatchAugment(components.device_augment, config.data.channels)
    micro = MicroStep(
        parts.fast.forward, parts.policy, parts.normalize, parts.exchange, parts.scale,
        config.run.smoothing, graphs=graphs, must_capture=config.run.cuda_graphs == "on",
        loss=parts.loss, augment=augment,
    )  # fmt: skip
    update = Update(
        parts.model, parts.optimizer, parts.exchange, parts.batch_norm, parts.scale, graphs=graphs,
        average=parts.average, clip_norm=parts.clip_norm,
    )  # fmt: skip
    run = config.run
    mixing = None
    if run.mixup or run.cutmix:
        mixing = Mixing(run.mixup, run.cutmix, config.data.image_size, run.seed)
    step = TrainStep(
        model=parts.model,
        micro=micro,
        update=update,
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
    )
    # An abort destroys CUDA graphs before the process groups whose collectives they hold.
    group.release_on_abort(step.release)
    return step


def create_master_optimizer(
    settings: OptimSettings, model: nn.Module, policy: Policy, rate: float,
    factory: Callable[..., Any] | None = None,
) -> MasterOptimizer:  # fmt: skip
    """Rounds the model's weights to the policy's format; the masters keep them as they were drawn."""
    groups = parameter_groups(model, settings.weight_decay)
    if settings.decay_bias_norm:
        groups = [{**group, "weight_decay": settings.weight_decay} for group in groups]
    groups = with_layer_decay(groups, model, settings.layer_decay)
    drawn = {p: p.detach().clone() for group in groups for p in group["params"]}
    policy.convert(model)
    optimizer = create_optimizer(settings, groups, rate, factory)
    # The optimizer's own order: it may have groups of its own.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if len(parameters) != len(drawn):
        raise ConfigError(
            "optimizer", None, f"it has {len(parameters)} of the {len(drawn)} trained parameters",
            "give it all groups; freeze parameters by requires_grad_(False)",
        )  # fmt: skip
    for master, parameter in zip(optimizer.masters(), parameters, strict=True):
        master.detach().copy_(drawn[parameter])
    return optimizer


@dataclass(frozen=True)
class ExchangeParts:
    """The plan of the exchange, as agreed by all ranks, before memory is allocated."""

    settings: CommSettings
    file: PlanFile
    trained: dict[str, nn.Parameter]
    origin: str

    @property
    def plan(self) -> FusionPlan:
        return self.file.plan

    @property
    def fp16_travels(self) -> bool:
        """Whether gradients are rounded to fp16 for the wire, with its small range."""
        return any(bucket.wire == "float16" for bucket in self.plan.buckets)

    def create(
        self, group: Group, *, accumulate: bool, graphs: bool, squares: bool = False
    ) -> GradientExchange:
        """Process groups, thread and memory. `graphs`: micro-steps are captured in CUDA graphs;
        `squares`: for the noise scale."""
        transport = create_transport(group, self.settings, self.plan)
        wanted = self.settings.overlap
        overlap = wanted == "on" or (wanted == "auto" and (not graphs or transport.capturable))

        def make() -> GradientExchange:
            where = f"with the gradients' buffers on {group.device}"
            with explain_out_of_memory(where, "free memory, or choose a smaller model"):
                return GradientExchange(
                    self.trained.items(), group, self.plan, accumulate=accumulate,
                    transport=transport, overlap=overlap, squares=squares,
                )  # fmt: skip

        return group.agree_on("exchange", make)


def plan_exchange(
    settings: CommSettings, model: nn.Module, group: Group, backward: Callable[[], None],
    pinned: PinnedPlan | None = None,
) -> ExchangeParts:  # fmt: skip
    """The fusion plan of the checkpoint, of the plan file or by the settings, the same on all ranks.
    `backward` runs one pass, to record the order of the gradients where it matters."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tensors = tuple(tensor_spec(name, p) for name, p in trained.items())
    facts = ModelFacts.of((spec.name, spec.length) for spec in tensors)
    group.agree(
        "parameters", facts={"the trained parameters": facts.describe()},
        remedy="build the same model on every rank",
    )  # fmt: skip
    cluster = ClusterFacts(group.world_size, _count_nodes(group))
    if pinned is not None:
        group.agree_on("checkpoint's tensors", lambda: _check_pinned(pinned, trained))
    if pinned is not None and pinned.whole:
        plan, origin = pinned.plan, "as in the checkpoint"
    else:
        choice = group.agree_on("plan", lambda: PlanChoice.read(settings, tensors, cluster))
        origin = f"plan {settings.plan}" if settings.plan else ""
        if choice.fixed is not None:
            plan = choice.fixed
        elif pinned is not None:
            order = pinned.plan.tensors
            plan, origin = choice.plan(order), "order as in the checkpoint"
        else:
            order = group.agree_on("gradient order", lambda: record_order(trained, backward))
            plan = choice.plan(agree_order(group, order))
    group.agree_on("plan fits", lambda: _checked(plan, trained))
    group.agree("fusion plan", facts={"the fusion plan": plan.fingerprint})
    file = PlanFile(plan, facts, cluster, _expected(settings, plan))
    return ExchangeParts(settings, file, trained, origin)


def _expected(settings: CommSettings, plan: FusionPlan) -> Expected | None:
    """The planner's expectation of this plan, for the report only."""
    if not settings.plan:
        return None
    try:
        file = PlanFile.read(Path(settings.plan))
    except ConfigError:
        return None
    # A file of `tune` without a model has a table of sizes, and no plan.
    return file.expected if file.fusion == plan else None


def _check_pinned(pinned: PinnedPlan, trained: dict[str, nn.Parameter]) -> PinnedPlan:
    other = sorted(set(pinned.plan.tensors) ^ set(trained))
    if other:
        raise CheckpointError(
            f"the checkpoint trains other tensors: {', '.join(other[:3])} ({len(other)} in all)",
            "resume with the settings of [model] that the run was started with",
        )
    return pinned


def _checked(plan: FusionPlan, trained: dict[str, nn.Parameter]) -> FusionPlan:
    plan.check(tuple(trained))
    return plan


def _count_nodes(group: Group) -> int:
    seen = torch.zeros(group.world_size, device=group.device)
    seen[min(group.topology.node_rank, group.world_size - 1)] = 1
    group.all_reduce_sum(seen)
    return int((seen > 0).sum())


def describe_exchange(exchange: GradientExchange, parts: ExchangeParts, moment: str) -> str:
    """`7 buckets of 84 KiB to 20.4 MiB, ring (5), hierarchical (2), float16 wire, overlapped`."""
    sizes = [bucket.bytes for bucket in exchange.bucket_info()]
    span = f"{len(sizes)} buckets of {format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
    count = span if len(sizes) > 1 else f"1 bucket of {format_bytes(sizes[0])}"
    names = [bucket.algorithm for bucket in parts.plan.buckets]
    many = len(set(names)) > 1
    ways = [f"{n} ({names.count(n)})" if many else n for n in dict.fromkeys(names)]
    wires = [f"{w} wire" for w in dict.fromkeys(b.wire for b in parts.plan.buckets) if w != "auto"]
    origin = [f"({parts.origin})"] if parts.origin else []
    return " ".join([", ".join([count, *ways, *wires, moment]), *origin])


@dataclass(frozen=True)
class DryBackward:
    """One backward pass over images of zeros, to record the order of the gradients.

    Running statistics and random numbers are restored; the caller discards the gradients. `images` is
    the shape of a micro-batch, so that compiled code serves the first step, too.
    """

    forward: Callable[[Tensor], Tensor]
    policy: Policy
    normalize: Normalizer
    batch_norm: BatchNormState
    images: tuple[int, int, int, int]
    loss: TrainingLoss = field(default_factory=CrossEntropy)
    # A user's model: its other buffers are restored too, and what it raises is reported in one line.
    foreign: nn.Module | None = None

    def __call__(self, guard: AbstractContextManager[None] | None = None) -> None:
        """Raises the errors of a first step. `guard` is around forward and backward."""
        try:
            with restored_buffers(self.foreign) if self.foreign else nullcontext():
                self._run(guard or nullcontext())
        except Exception as error:  # a defect of the program is raised again
            fault = step_error(error, 0, self.images[0], foreign=self.foreign is not None)
            if fault is None:
                raise
            raise fault from error

    def _run(self, guard: AbstractContextManager[None]) -> None:
        device = self.policy.device
        on_gpu = device.type == "cuda"
        self.batch_norm.remember()
        with torch.random.fork_rng(devices=[device] if on_gpu else []):
            zeros = torch.zeros(self.images, dtype=torch.uint8, device=device)
            every = torch.ones((), device=device)
            try:
                with guard:
                    with self.policy.compute():
                        outputs = self.forward(self.normalize(zeros, device))
                    if isinstance(self.loss, CrossEntropy):
                        outputs.float().sum().backward()  # type: ignore[no-untyped-call]
                    else:
                        self._total(outputs, mixes=False).backward()  # type: ignore[no-untyped-call]
            finally:
                self.batch_norm.discard_if(every)
        if on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()

    def check_loss(self, model: nn.Module, *, mixes: bool) -> TrainingLoss:
        """Tries the loss, forward and backward, and returns it. Raises one line if it raises, has another
        shape or no gradient. Notes an own loss that does not take the model's evaluation outputs."""
        try:
            with restored_buffers(self.foreign) if self.foreign else nullcontext():
                self._check_loss(model, mixes)
            return self.loss
        except Exception as error:  # a defect of the program is raised again
            fault = step_error(error, 0, self.images[0], foreign=self.foreign is not None)
            if fault is None:
                raise
            raise fault from error

    def _check_loss(self, model: nn.Module, mixes: bool) -> None:
        device = self.policy.device
        trained = [p for p in model.parameters() if p.requires_grad]
        self.batch_norm.remember()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            zeros = torch.zeros(self.images, dtype=torch.uint8, device=device)
            with self.policy.compute():
                outputs = self.forward(self.normalize(zeros, device))
            total = self._total(outputs, mixes=mixes)
            check_gradient(total, self.loss)
            try:
                torch.autograd.grad(total, trained, allow_unused=True)
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
                    raise
                raise RunError(
                    f"the backward pass of the loss {self.loss.name} failed ({first_line(error)})",
                    "compute it from the outputs with differentiable operations",
                ) from error
            if isinstance(self.loss, OwnLoss):
                self.loss.in_evaluation = self._takes_evaluation(model, zeros)
        self.batch_norm.discard_if(torch.ones((), device=device))

    def _takes_evaluation(self, model: nn.Module, zeros: Tensor) -> bool:
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"), self.policy.compute():
                outputs = model(self.normalize(zeros, self.policy.device))
                self.loss.evaluated(outputs, self._labels(len(zeros)))
        except RunError:
            return False
        finally:
            for module, training in modes:
                module.training = training
        return True

    def _total(self, outputs: Any, *, mixes: bool) -> Tensor:
        own = torch.ones(self.images[0], device=self.policy.device) if mixes else None
        return self.loss.total(outputs, self._labels(self.images[0]), own)

    def _labels(self, samples: int) -> Tensor:
        return torch.zeros(samples, dtype=torch.int64, device=self.policy.device)
