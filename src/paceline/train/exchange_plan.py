"""Chooses how gradients are exchanged (buckets, algorithms, formats) and creates the exchange.

These choices are a `FusionPlan`, which is equal on all ranks. A resumed run keeps the plan of the
checkpoint if the number of ranks and the settings that determine the plan are unchanged. Otherwise the
plan comes from the plan file (`comm.plan`) or, if there is none, from the other settings
(`ChosenPlan.of`). A backward pass before the first step records the order of the gradients and tests
model and loss (`DryBackward`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.exchange import GradientExchange, tensor_spec
from paceline.comm.group import Group
from paceline.comm.plan_choice import Constants, PlanChoice, agree_order, record_order
from paceline.comm.settings import CommSettings
from paceline.comm.transport import Transport, create_transport
from paceline.config import RunConfig
from paceline.core.errors import CheckpointError, ConfigError, RunError
from paceline.core.extensions import load_part
from paceline.core.imports import first_line
from paceline.core.units import format_bytes
from paceline.data import Normalizer
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.plan_file import ClusterFacts, Expected, ModelFacts, PlanFile
from paceline.plan.wires import own_algorithm, wire_format
from paceline.precision.policy import Policy
from paceline.train.batch_norm import BatchNormState
from paceline.train.evaluate import takes_evaluation
from paceline.train.fast_path import FastPath
from paceline.train.loss import CrossEntropy, OwnLoss, TrainingLoss
from paceline.train.machine import explain_out_of_memory
from paceline.train.micro_step import Advise, no_advice
from paceline.train.model_checks import restored_buffers, step_error
from paceline.train.run_state import PinnedPlan
from paceline.train.strategy import Strategy, is_idle, strategy_class


@dataclass(frozen=True)
class ExchangeParts:
    """How gradients will be exchanged. All ranks agree on this before they allocate the buffers.

    Attributes:
        settings: The section `[comm]`.
        file: The fusion plan, together with the model and the cluster for which it was made.
        trained: The trained parameters by name.
        origin: Text that says where the plan comes from; "" if the settings made it.
    """

    settings: CommSettings
    file: PlanFile
    trained: dict[str, nn.Parameter]
    origin: str

    @property
    def plan(self) -> FusionPlan:
        """The fusion plan: the gradient buckets with their algorithms and wire formats."""
        return self.file.plan

    @property
    def fp16_travels(self) -> bool:
        """True if gradients are exchanged in fp16 or another format with a small range."""
        return any(wire_format(bucket.wire).small_range for bucket in self.plan.buckets)

    def create(
        self, group: Group, *, accumulate: bool, graphs: bool, squares: bool = False,
        transport: Transport | None = None,
    ) -> GradientExchange:  # fmt: skip
        """Creates the exchange with its process groups, thread and memory. All ranks call this.

        Args:
            group: The ranks.
            accumulate: True if a step has several micro-batches.
            graphs: True if micro-steps are captured as CUDA graphs.
            squares: True to measure the squared norms of the micro-steps' gradients for the noise scale.
            transport: Sends the buckets. None means the transport that the plan needs.
        """
        transport = transport or create_transport(group, self.settings, self.plan)
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


@dataclass(frozen=True)
class ChosenPlan:
    """The fusion plan (gradient buckets) that the checkpoint, the plan file or the settings choose.

    Attributes:
        choice: Makes a plan from the settings; None if the checkpoint decides.
        plan: The plan, or None if it depends on the order of the gradients, which is not known yet.
        origin: Description of the plan's origin.
        constants: The measured constants of the cluster, by which `comm.algorithm = auto` chooses.
    """

    settings: CommSettings
    trained: dict[str, nn.Parameter]
    model: ModelFacts
    cluster: ClusterFacts
    choice: PlanChoice | None
    plan: FusionPlan | None
    origin: str
    constants: PlanFile | None = None

    @classmethod
    def of(
        cls, settings: CommSettings, model: nn.Module, cluster: ClusterFacts,
        pinned: PinnedPlan | None = None, constants: PlanFile | None = None,
    ) -> ChosenPlan:  # fmt: skip
        """Chooses the plan from the checkpoint, the plan file or the settings.

        Args:
            settings: The section `[comm]`.
            model: The model whose trained parameters are exchanged.
            cluster: Number of ranks and nodes.
            pinned: The plan of the checkpoint, if a run is resumed.
            constants: The measured constants of the cluster, if there are any.

        Raises:
            CheckpointError: If the trained tensors of the checkpoint are not those of the model.
            ConfigError: If the plan does not fit the model.
        """
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        tensors = tuple(tensor_spec(name, p) for name, p in trained.items())
        facts = ModelFacts.of((spec.name, spec.length) for spec in tensors)
        different = sorted(set(pinned.plan.tensors) ^ set(trained)) if pinned is not None else []
        if different:
            raise CheckpointError(
                f"the checkpoint trains other tensors: {', '.join(different[:3])} "
                f"({len(different)} in all)",
                "resume with the settings of [model] that the run was started with",
            )
        choice, plan, origin = None, None, "as in the checkpoint"
        if pinned is not None and pinned.whole:
            plan = pinned.plan
        else:
            choice = PlanChoice.read(settings, tensors, cluster, constants)
            plan, origin = choice.fixed, f"plan {settings.plan}" if settings.plan else ""
            if plan is None and pinned is not None:
                plan, origin = choice.plan(pinned.plan.tensors), "order as in the checkpoint"
        if plan is not None:
            plan.check(tuple(trained))
        return cls(settings, trained, facts, cluster, choice, plan, origin, constants)

    def facts(self) -> dict[str, str]:
        """Returns values that all ranks compare before they create process groups."""
        if self.plan is not None:
            decides = {"the fusion plan": self.plan.fingerprint}
        else:
            assert self.choice is not None
            decides = {"the table of sizes": str(self.choice.table.to_table()["sizes"])}
        return {"the trained parameters": self.model.describe(), **decides}


def plan_exchange(chosen: ChosenPlan, group: Group, backward: Callable[[], None]) -> ExchangeParts:
    """Completes a choice of buckets, with the order of the gradients if the plan depends on it.

    All ranks call this.

    Args:
        chosen: The choice, on which all ranks have agreed.
        group: The ranks.
        backward: Runs one forward and backward pass, which yields the order of the gradients.

    Returns:
        The complete plan with the facts about model and cluster.
    """
    plan = chosen.plan
    if plan is None:
        assert chosen.choice is not None
        with group.phase("gradient order"):
            order = record_order(chosen.trained, backward)
        plan = chosen.choice.plan(agree_order(group, order))
        plan.check(tuple(chosen.trained))
    file = PlanFile(plan, chosen.model, chosen.cluster, _expected(chosen.settings, plan))
    if chosen.constants is not None:
        measured = chosen.constants
        file = replace(file, probed=measured.probed, measured=measured.measured)
    return ExchangeParts(chosen.settings, file, chosen.trained, chosen.origin)


def measured_constants(
    config: RunConfig, group: Group, strategy: Strategy, pinned: PinnedPlan | None
) -> Constants:
    """Returns the constants by which `comm.algorithm = auto` chooses. A collective."""
    comm, known = config.comm, pinned.constants if pinned is not None else None
    if pinned is not None and pinned.whole:
        return Constants(known)
    if comm.algorithm != "auto" or comm.plan or own_algorithm(comm.wire):
        return Constants()
    if comm.min_ranks:  # only waits of `native` notice every lost rank at once
        return Constants()
    if group.world_size < 2 or not strategy.same_weights:
        return Constants()
    find = load_part("comm.exchange_probe:find_constants", "comm.algorithm", "auto")
    found: Constants = find(group, comm, known)
    return found


def _expected(settings: CommSettings, plan: FusionPlan) -> Expected | None:
    """Returns the planner's predicted times for this plan, for the report."""
    if not settings.plan:
        return None
    try:
        file = PlanFile.read(Path(settings.plan))
    except ConfigError:
        return None
    # A file of `tune` without a model has a table of sizes instead of a plan.
    return file.expected if file.fusion == plan else None


def check_wires(config: RunConfig, plan: FusionPlan, origin: str) -> None:
    """Checks that the configuration allows the wire formats of a plan, as it would for `comm.wire`.

    Args:
        config: The settings of the run.
        plan: The plan, equal on all ranks.
        origin: Text that says where the plan comes from; decides which remedy the error names.

    Raises:
        ConfigError: If the configuration does not allow the wire format of a bucket.
    """
    from_file = origin == f"plan {config.comm.plan}"
    for wire in sorted({bucket.wire for bucket in plan.buckets}):
        try:
            config.check_wire(wire)
        except ConfigError as error:
            raise ConfigError(
                "comm.plan", config.comm.plan or None,
                f"the {origin if from_file else 'plan of the checkpoint'} has buckets in {wire}: "
                f"{error.cause}",
                "use a plan without this format, or leave comm.plan out" if from_file
                else "start anew without --resume",
            ) from None  # fmt: skip


def count_nodes(group: Group) -> int:
    """Returns the number of nodes on which ranks run. All ranks call this."""
    seen = torch.zeros(group.world_size, device=group.device)
    seen[min(group.topology.node_rank, group.world_size - 1)] = 1
    group.all_reduce_sum(seen)
    return int((seen > 0).sum())


def describe_exchange(exchange: GradientExchange, parts: ExchangeParts, fast: FastPath) -> str:
    """Describes the gradient exchange for display.

    Returns:
        "" if there is no process group, else a line such as `7 buckets of 84 KiB to 20.4 MiB,
        ring (5), hierarchical (2), float16 wire, overlapped`.
    """
    if exchange.group.backend == "none":
        return ""
    sizes = [bucket.bytes for bucket in exchange.bucket_info()]
    span = f"{len(sizes)} buckets of {format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
    count = span if len(sizes) > 1 else f"1 bucket of {format_bytes(sizes[0])}"
    names = [bucket.algorithm for bucket in parts.plan.buckets]
    many = len(set(names)) > 1
    algorithms = [f"{n} ({names.count(n)})" if many else n for n in dict.fromkeys(names)]
    wires = [f"{w} wire" for w in dict.fromkeys(b.wire for b in parts.plan.buckets) if w != "auto"]
    origin = [f"({parts.origin})"] if parts.origin else []
    return " ".join([", ".join([count, *algorithms, *wires, _when(exchange, fast)]), *origin])


def describe_idle(config: RunConfig, ranks: int) -> str:
    """Lists given settings that have no effect on one rank, such as `comm.algorithm`.

    Args:
        config: The settings of the run.
        ranks: Number of ranks.

    Returns:
        The settings with the reason; "" if every given setting has an effect.
    """
    if ranks > 1:
        return ""
    comm, defaults = config.comm, CommSettings()
    # All algorithms except `auto` round buckets to the wire format even on one rank.
    names = ["algorithm", "group_size", *(["wire"] if comm.algorithm == "auto" else [])]
    values = {name: getattr(comm, name) for name in names}
    idle = [f"comm.{n} = {v!r}" for n, v in values.items() if v != getattr(defaults, n)]
    if is_idle(strategy_class(config), 1):
        idle.insert(0, f"run.strategy = {config.run.strategy!r}")
    return f"{', '.join(idle)}: with one rank" if idle else ""


def _when(exchange: GradientExchange, fast: FastPath) -> str:
    """Describes when the exchange sends buckets: during or after the backward pass."""
    if exchange.note:
        return exchange.note
    if not exchange.overlaps:
        return "after backward"
    if fast.gradients_at_end:
        return "overlapped (of little use: backward yields all gradients at its end)"
    if not fast.graphs:
        return "overlapped"
    if exchange.transport.capturable:
        return "overlapped, in the CUDA graph"
    return "overlapped, last micro-step not captured"


@dataclass(frozen=True)
class DryBackward:
    """Runs a forward and backward pass over images of zeros, before the first step.

    This records the order of the gradients and finds errors in model and loss.

    Running statistics and random generators are restored. The caller discards the gradients.

    Attributes:
        forward: The forward pass.
        policy: The number format of the pass.
        normalize: Turns uint8 images into inputs of the model.
        batch_norm: The running statistics, which the pass restores.
        images: Shape of a micro-batch, so that the first step can reuse compiled code.
        loss: The training loss.
        foreign: The model, if it is a user's; None for a built-in model. The buffers of a user's model
            are restored, too, and its exceptions become errors of one line.
        advise: Returns remedies for an exception in the pass.
    """

    forward: Callable[[Tensor], Tensor]
    policy: Policy
    normalize: Normalizer
    batch_norm: BatchNormState
    images: tuple[int, int, int, int]
    loss: TrainingLoss = field(default_factory=CrossEntropy)
    foreign: nn.Module | None = None
    advise: Advise = no_advice

    def __call__(self) -> None:
        """Runs the pass and raises the same errors as the first step would."""
        device = self.policy.device
        with self._as_first_step():
            outputs = self._outputs()
            self._total(outputs, mixes=False).backward()  # type: ignore[no-untyped-call]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()

    def check_loss(self, model: nn.Module, *, mixes: bool) -> TrainingLoss:
        """Tests the loss with a forward and a backward pass.

        Args:
            model: The model. Its outputs in evaluation mode might not suit a user's loss.
            mixes: True if training mixes images (mixup or CutMix).

        Returns:
            The loss. A user's loss has recorded whether it accepts the outputs in evaluation mode.

        Raises:
            RunError: If the loss fails, or has a wrong shape or no gradient.
        """
        trained = [p for p in model.parameters() if p.requires_grad]
        with self._as_first_step():
            total = self._total(self._outputs(), mixes=mixes)
            remedy = "compute it from the outputs with differentiable operations"
            if not total.requires_grad:
                raise RunError(
                    f"the loss {self.loss.name} has no gradient: it does not depend on the outputs, or "
                    "detaches them",
                    remedy,
                )
            try:
                torch.autograd.grad(total, trained, allow_unused=True)
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
                    raise
                raise RunError(
                    f"the backward pass of the loss {self.loss.name} failed ({first_line(error)})",
                    remedy,
                ) from error
            if isinstance(self.loss, OwnLoss):
                self.loss.in_evaluation = takes_evaluation(
                    self.loss, model, self.normalize, self.policy, self.images
                )
        return self.loss

    @contextmanager
    def _as_first_step(self) -> Iterator[None]:
        """Restores buffers and random generators at the end; explains errors as the first step does."""
        device = self.policy.device
        self.batch_norm.remember()
        try:
            with (
                restored_buffers(self.foreign) if self.foreign else nullcontext(),
                torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            ):
                try:
                    yield
                finally:
                    self.batch_norm.discard_if(torch.ones((), device=device))
        except Exception as error:  # a defect of the program is raised again
            fault = step_error(
                error, 0, self.images[0], foreign=self.foreign is not None, advise=self.advise
            )
            if fault is None:
                raise
            raise fault from error

    def _outputs(self) -> Tensor:
        zeros = torch.zeros(self.images, dtype=torch.uint8, device=self.policy.device)
        with self.policy.compute():
            return self.forward(self.normalize(zeros, self.policy.device))

    def _total(self, outputs: Any, *, mixes: bool) -> Tensor:
        samples, device = self.images[0], self.policy.device
        own = torch.ones(samples, device=device) if mixes else None
        labels = torch.zeros(samples, dtype=torch.int64, device=device)
        return self.loss.total(outputs, labels, own)
