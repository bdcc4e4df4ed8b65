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
from paceline.comm.memory import Weights
from paceline.comm.plan_choice import PlanChoice, agree_order, record_order
from paceline.comm.rehearsal import RehearsedExchange, cluster_groups
from paceline.comm.settings import CommSettings
from paceline.comm.transport import create_transport
from paceline.config import RunConfig
from paceline.core.errors import CheckpointError, ConfigError, RunError
from paceline.core.imports import first_line
from paceline.core.units import format_bytes
from paceline.data import BatchAugment, BatchPlan, Normalizer, TrainBatches
from paceline.models.registry import is_own, parameter_groups
from paceline.models.synced_norm import NormGroup
from paceline.optim.base import MasterOptimizer
from paceline.optim.build import create_optimizer
from paceline.optim.layers import describe_layers, with_layer_decay
from paceline.optim.muon import Muon
from paceline.optim.orthogonal import SharedProducts
from paceline.optim.settings import ANCHORED, OptimSettings
from paceline.plan.fusion_plan import EIGHT_BIT, FusionPlan
from paceline.plan.plan_file import ClusterFacts, Expected, ModelFacts, PlanFile
from paceline.plan.rehearsal import RehearseSettings
from paceline.precision.policy import LossScale, Policy, allow_tf32, choose_policy
from paceline.train.asynchronous import AsynchronousUpdate
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
from paceline.train.step import Anchors, TrainStep
from paceline.train.stop_signals import StopSignals
from paceline.train.update import Update
from paceline.train.weights import BatchNormState, WeightAverage, create_average, fingerprint


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
    # A micro-batch of zeros, forward and backward, without a trace.
    dry: DryBackward
    clip_norm: float = 0.0
    average: WeightAverage | None = None

    def probe(self) -> None:
        """Computes as a micro-batch of an equal share does."""
        self.dry()
        self.model.zero_grad(set_to_none=True)

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
    settings = config.optim
    cluster = ClusterFacts(
        config.rehearse.ranks or group.world_size, config.rehearse.nodes or _count_nodes(group)
    )
    with group.phase("training parts") as same:
        problem = triton_problem(group.device)
        same.compare({"Triton": problem or "usable"}, "use the same image on all nodes")
        policy = choose_policy(config.precision, group.device)
        if config.comm.mode == "asynchronous" and policy.scales_loss:
            raise ConfigError(
                "precision.amp_dtype", policy.name,
                "needs a loss scale that all ranks agree on in every step, and asynchronous ranks do "
                "not",
                "use --amp-dtype bf16 or fp32",
            )  # fmt: skip
        allow_tf32(config.precision)
        if problem and settings.fused == "auto":
            settings = replace(settings, fused="foreach")
        optimizer = create_master_optimizer(
            settings, model, policy, rate, components.optimizer, config.run.seed
        )
        loss = create_loss(config.run, components.loss, classes)
        if isinstance(optimizer, Muon) or optimizer.path == "torch":
            own = isinstance(optimizer, Muon)
            name = type(optimizer).__name__.lower() if own else "this optimizer"
            remedy = f"{name} wants one kind of device and as many threads everywhere; or use lars"
            same.compare({"what computes": _computes(group.device)}, remedy)
        batch_norm = BatchNormState(model, config.rehearse.ranks)
        shared = config.comm.share_gpus and group.world_size > 1
        fast = choose_fast_path(config.run, model, group.device, problem, shared_gpu=shared)
        start = {"initial weights": fingerprint(model)}
        same.compare(start, "use the same --pretrained file and versions")
        chosen = ChosenPlan.of(config.comm, model, cluster, pinned)
        same.compare(chosen.facts(), "build the same model on every rank")
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
    # Refused alike on all ranks, which have agreed on the configuration.
    share_products(config, optimizer, group, fast.graphs)
    planned = plan_exchange(chosen, group, dry, config.rehearse)
    _check_wires(config, planned)
    exchange = planned.create(
        group, accumulate=accumulate, graphs=fast.graphs, squares=config.run.noise_scale
    )
    scale = LossScale(policy, config.precision, fp16_travels=planned.fp16_travels)
    if (memory := exchange.memory) is not None:
        memory.scale = scale.step_value
        memory.bind(Weights(optimizer))
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
        exchange_summary=_describe_option(config.comm, group.world_size)
        or describe_exchange(exchange, planned, _when(exchange, fast)),
        average=average,
        loss=loss,
        dry=dry,
        clip_norm=settings.clip_norm,
    )


def _check_wires(config: RunConfig, planned: ExchangeParts) -> None:
    """A plan file has wire formats of its own: those that the configuration would refuse as `comm.wire`
    are refused in it too, alike on all ranks, which have the same plan."""
    wires = {bucket.wire for bucket in planned.plan.buckets}
    where = f"the plan {config.comm.plan or 'of the checkpoint'} has buckets in"
    for wire in sorted(wires & set(EIGHT_BIT)):
        if config.run.noise_scale:
            reason = f"but {where} {wire}, which adds noise of its own"
            raise ConfigError("run.noise_scale", True, reason, "use False")
    if config.optim.name in ANCHORED:
        for wire in sorted(wires & {*EIGHT_BIT, "float16"}):
            raise ConfigError(
                "optim.name", config.optim.name, f"but {where} {wire}, which its full gradients cannot "
                "be exchanged in", "make a plan without it, or leave comm.plan out",
            )  # fmt: skip


def _describe_option(settings: CommSettings, ranks: int) -> str:
    """Of an exchange that is no all-reduce of buckets; empty for others."""
    if ranks == 1:
        return ""
    if settings.mode == "asynchronous":
        servers = min(settings.servers or ranks, ranks)
        return (
            f"asynchronous, {servers} parameter server(s), staleness of {settings.staleness} steps"
        )
    if settings.hook == "powersgd":
        return (
            f"torch's PowerSGD of rank {settings.powersgd_rank}, from step "
            f"{settings.powersgd_start_step} on, after backward"
        )
    if settings.hook == "post_local_sgd":
        return (
            f"torch's post-local SGD, weights averaged every {settings.local_steps} steps, from step "
            f"{settings.local_start_step} on"
        )
    return ""


def share_products(
    config: RunConfig, optimizer: MasterOptimizer, group: Group, graphs: bool
) -> bool:
    """Lets the ranks share Muon's products out, where `optim.share_products` says so; whether they do.
    Shared or not, the results have the same bits on CPUs."""
    wanted = config.optim.share_products
    if not isinstance(optimizer, Muon) or group.world_size == 1 or wanted == "off":
        return False
    if config.comm.mode == "asynchronous" or config.comm.hook == "post_local_sgd":
        return False  # ranks have gradients and momenta of their own
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
    if isinstance(exchange, RehearsedExchange):
        return exchange.describe()
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
    stop: StopSignals, components: Components | None = None, norm_group: NormGroup | None = None,
    anchors: Anchors | None = None,
) -> TrainStep:  # fmt: skip
    graphs = parts.fast.graphs
    augment = None
    if components is not None and components.device_augment is not None:
        augment = BatchAugment(components.device_augment, config.data.channels)
    micro = MicroStep(
        parts.fast.forward, parts.policy, parts.normalize, parts.exchange, parts.scale,
        config.run.smoothing, graphs=graphs, must_capture=config.run.cuda_graphs == "on",
        loss=parts.loss, augment=augment, signed=anchors is not None,
    )  # fmt: skip
    update = _create_update(config, parts, group, components or Components())
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
        norm_group=norm_group,
        anchors=anchors,
        checks_parameters=not is_own(parts.model) or bool(components and components.callbacks),
    )
    # An abort destroys CUDA graphs before the process groups whose collectives they hold.
    group.release_on_abort(step.release)
    return step


def _create_update(
    config: RunConfig, parts: StepParts, group: Group, components: Components
) -> Update | AsynchronousUpdate:
    if config.comm.mode == "asynchronous" and group.world_size > 1:
        full = replace(parts.policy, dtype=torch.float32)
        settings = replace(config.optim, fused="auto")
        return AsynchronousUpdate(
            parts.model, parts.optimizer, parts.exchange, parts.batch_norm, group, config.comm,
            lambda model: create_master_optimizer(settings, model, full, 0.1, components.optimizer),
        )  # fmt: skip
    return Update(
        parts.optimizer, parts.exchange, parts.batch_norm, parts.scale,
        graphs=parts.fast.graphs, average=parts.average, clip_norm=parts.clip_norm,
    )  # fmt: skip


def create_master_optimizer(
    settings: OptimSettings, model: nn.Module, policy: Policy, rate: float,
    factory: Callable[..., Any] | None = None, seed: int = 0,
) -> MasterOptimizer:  # fmt: skip
    """Rounds the model's weights to the policy's format; the masters keep them as they were drawn."""
    groups = parameter_groups(model, settings.weight_decay)
    if settings.decay_bias_norm:
        groups = [{**group, "weight_decay": settings.weight_decay} for group in groups]
    groups = with_layer_decay(groups, model, settings.layer_decay)
    drawn = {p: p.detach().clone() for group in groups for p in group["params"]}
    policy.convert(model)
    optimizer = create_optimizer(settings, groups, rate, factory, seed)
    # The optimizer's own order: it may have groups of its own.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if len(parameters) != len(drawn):
        raise ConfigError(
            "optimizer", None, f"it has {len(parameters)} of the {len(drawn)} trained parameters",
            "give it all groups; freeze parameters by requires_grad_(False)",
        )  # fmt: skip
    for master, parameter in zip(optimizer.masters(), parameters, strict=True):
        if master is not parameter:
            master.detach().copy_(drawn[parameter])
    return optimizer


@dataclass(frozen=True)
class ExchangeParts:
    """The plan of the exchange, as agreed by all ranks, before memory is allocated."""

    settings: CommSettings
    file: PlanFile
    trained: dict[str, nn.Parameter]
    origin: str
    rehearse: RehearseSettings

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
        if self.rehearse.ranks:
            return group.agree_on("exchange", lambda: self._rehearsed(group, accumulate, squares))
        transport = create_transport(group, self.settings, self.plan)
        wanted = self.settings.overlap
        overlap = wanted == "on" or (wanted == "auto" and (not graphs or transport.capturable))

        where = f"with the gradients' buffers on {group.device}"
        with group.phase("exchange") as same:
            same.compare({"the fusion plan": self.plan.fingerprint})
            with explain_out_of_memory(where, "free memory, or choose a smaller model"):
                return GradientExchange(
                    self.trained.items(), group, self.plan, accumulate=accumulate,
                    transport=transport, overlap=overlap, squares=squares,
                )  # fmt: skip

    def _rehearsed(self, group: Group, accumulate: bool, squares: bool) -> GradientExchange:
        cluster = self.rehearse
        for bucket in self.plan.buckets:
            if bucket.wire in EIGHT_BIT:
                raise ConfigError(
                    "comm.plan", self.settings.plan or None,
                    f"has buckets in {bucket.wire}, which cannot be rehearsed",
                    "make a plan without 8-bit formats, or leave comm.plan out",
                )  # fmt: skip
        groups = cluster_groups(cluster.nodes, cluster.gpus_per_node, self.settings.group_size)
        where = f"with the partial sums of {cluster.ranks:,} virtual ranks on {group.device}"
        remedy = (
            "use comm.algorithm=hierarchical, torus2d or tree, which keep fewer, or fewer ranks"
        )
        with explain_out_of_memory(where, remedy):
            return RehearsedExchange(
                self.trained.items(), group, self.plan, groups, accumulate=accumulate,
                squares=squares,
            )  # fmt: skip


@dataclass(frozen=True)
class ChosenPlan:
    """The fusion plan of the checkpoint, of the plan file or by the settings; `plan` is None where it
    depends on the order of the gradients, which is not known yet."""

    settings: CommSettings
    trained: dict[str, nn.Parameter]
    model: ModelFacts
    cluster: ClusterFacts
    choice: PlanChoice | None
    plan: FusionPlan | None
    origin: str

    @classmethod
    def of(
        cls, settings: CommSettings, model: nn.Module, cluster: ClusterFacts,
        pinned: PinnedPlan | None = None,
    ) -> ChosenPlan:  # fmt: skip
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        tensors = tuple(tensor_spec(name, p) for name, p in trained.items())
        facts = ModelFacts.of((spec.name, spec.length) for spec in tensors)
        if pinned is not None:
            _check_pinned(pinned, trained)
        choice, plan, origin = None, None, "as in the checkpoint"
        if pinned is not None and pinned.whole:
            plan = pinned.plan
        else:
            choice = PlanChoice.read(settings, tensors, cluster)
            plan, origin = choice.fixed, f"plan {settings.plan}" if settings.plan else ""
            if plan is None and pinned is not None:
                plan, origin = choice.plan(pinned.plan.tensors), "order as in the checkpoint"
        if plan is not None:
            plan.check(tuple(trained))
        return cls(settings, trained, facts, cluster, choice, plan, origin)

    def facts(self) -> dict[str, str]:
        """Which all ranks must have in common, before they make process groups by the plan."""
        if self.plan is not None:
            decides = {"the fusion plan": self.plan.fingerprint}
        else:
            assert self.choice is not None
            decides = {"the table of sizes": str(self.choice.table.to_table()["sizes"])}
        return {"the trained parameters": self.model.describe(), **decides}


def plan_exchange(
    chosen: ChosenPlan, group: Group, backward: Callable[[], None],
    rehearse: RehearseSettings | None = None,
) -> ExchangeParts:  # fmt: skip
    """All ranks have agreed on `chosen`. `backward` runs one pass, to record the order of the gradients
    where it matters."""
    plan = chosen.plan
    if plan is None:
        assert chosen.choice is not None
        with group.phase("gradient order"):
            order = record_order(chosen.trained, backward)
        plan = chosen.choice.plan(agree_order(group, order))
        plan.check(tuple(chosen.trained))
    file = PlanFile(plan, chosen.model, chosen.cluster, _expected(chosen.settings, plan))
    rehearse = rehearse or RehearseSettings()
    return ExchangeParts(chosen.settings, file, chosen.trained, chosen.origin, rehearse)


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


def _check_pinned(pinned: PinnedPlan, trained: dict[str, nn.Parameter]) -> None:
    other = sorted(set(pinned.plan.tensors) ^ set(trained))
    if other:
        raise CheckpointError(
            f"the checkpoint trains other tensors: {', '.join(other[:3])} ({len(other)} in all)",
            "resume with the settings of [model] that the run was started with",
        )


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
