"""The plan of the gradient exchange: chosen, agreed among all ranks, and made into an exchange.

A checkpoint's plan is kept while the settings that decide it and the number of ranks are the same; else
the plan file decides, and without one the settings (`ChosenPlan.of`). A backward pass before the
first step gives the order of the gradients, and shows whether model and loss work (`DryBackward`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.exchange import GradientExchange, tensor_spec
from paceline.comm.group import Group
from paceline.comm.plan_choice import PlanChoice, agree_order, record_order
from paceline.comm.settings import CommSettings
from paceline.comm.transport import Transport, create_transport
from paceline.config import RunConfig
from paceline.core.errors import CheckpointError, ConfigError, RunError
from paceline.core.imports import first_line
from paceline.core.units import format_bytes
from paceline.data import Normalizer
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.plan_file import ClusterFacts, Expected, ModelFacts, PlanFile
from paceline.plan.wires import wire_format
from paceline.precision.policy import Policy
from paceline.train.batch_norm import BatchNormState
from paceline.train.evaluate import takes_evaluation
from paceline.train.fast_path import FastPath
from paceline.train.loss import CrossEntropy, OwnLoss, TrainingLoss, check_gradient
from paceline.train.machine import explain_out_of_memory
from paceline.train.micro_step import Advise, no_advice, step_error
from paceline.train.model_checks import restored_buffers
from paceline.train.run_state import PinnedPlan
from paceline.train.strategy import is_idle, strategy_class


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
        """Whether gradients travel in fp16, or in a format with as small a range."""
        return any(wire_format(bucket.wire).small_range for bucket in self.plan.buckets)

    def create(
        self, group: Group, *, accumulate: bool, graphs: bool, squares: bool = False,
        transport: Transport | None = None,
    ) -> GradientExchange:  # fmt: skip
        """Process groups, thread and memory. `graphs`: micro-steps are captured in CUDA graphs;
        `squares`: for the noise scale. Without a `transport` the plan decides it."""
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


def plan_exchange(chosen: ChosenPlan, group: Group, backward: Callable[[], None]) -> ExchangeParts:
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
    return ExchangeParts(chosen.settings, file, chosen.trained, chosen.origin)


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


def check_wires(config: RunConfig, plan: FusionPlan, origin: str) -> None:
    """A plan file has wire formats of its own: those that the configuration would refuse as `comm.wire`
    are refused in it too, alike on all ranks, which have the same plan. `origin` is that of the plan."""
    from_file = origin == f"plan {config.comm.plan}"
    for wire in sorted({bucket.wire for bucket in plan.buckets}):
        try:
            config.check_wire(wire)
        except ConfigError as error:
            raise ConfigError(
                "comm.plan", config.comm.plan or None,
                f"the {origin if from_file else 'plan of the checkpoint'} has buckets in {wire}: "
                f"{error.cause}",
                "make a plan without it, or leave comm.plan out" if from_file
                else "start anew without --resume",
            ) from None  # fmt: skip


def count_nodes(group: Group) -> int:
    seen = torch.zeros(group.world_size, device=group.device)
    seen[min(group.topology.node_rank, group.world_size - 1)] = 1
    group.all_reduce_sum(seen)
    return int((seen > 0).sum())


def describe_exchange(exchange: GradientExchange, parts: ExchangeParts, fast: FastPath) -> str:
    """`7 buckets of 84 KiB to 20.4 MiB, ring (5), hierarchical (2), float16 wire, overlapped`."""
    sizes = [bucket.bytes for bucket in exchange.bucket_info()]
    span = f"{len(sizes)} buckets of {format_bytes(min(sizes))} to {format_bytes(max(sizes))}"
    count = span if len(sizes) > 1 else f"1 bucket of {format_bytes(sizes[0])}"
    names = [bucket.algorithm for bucket in parts.plan.buckets]
    many = len(set(names)) > 1
    ways = [f"{n} ({names.count(n)})" if many else n for n in dict.fromkeys(names)]
    wires = [f"{w} wire" for w in dict.fromkeys(b.wire for b in parts.plan.buckets) if w != "auto"]
    origin = [f"({parts.origin})"] if parts.origin else []
    return " ".join([", ".join([count, *ways, *wires, _when(exchange, fast)]), *origin])


def describe_idle(config: RunConfig, ranks: int) -> str:
    """The settings that have no effect, such as `comm.algorithm` on one rank, `optim.momentum` of
    another optimizer, or a table of an owner that nothing has chosen; empty where there are none."""
    found = []
    if ranks == 1 and (idle := _idle_on_one_rank(config)):
        found.append(f"{', '.join(idle)}: for several ranks, and this is one")
    reasons: dict[str, list[str]] = {}
    for name, reason in config.optim.idle.items():
        value = getattr(config.optim, name)
        shown = list(value) if isinstance(value, tuple) else value
        reasons.setdefault(reason, []).append(f"optim.{name} = {shown!r}")
    for section, owner in config.unused():
        if section.owned[owner] != type(section.owned[owner])():
            chosen = {name: getattr(section, name) for name in section.CHOOSERS}
            reason = " and ".join(f"{section.NAME}.{n} = {value!r}" for n, value in chosen.items())
            reasons.setdefault(reason, []).append(f"[{section.NAME}.{owner}]")
    found += [f"{', '.join(idle)}: with {reason}" for reason, idle in reasons.items()]
    return "; ".join(found)


def _idle_on_one_rank(config: RunConfig) -> list[str]:
    comm, usual = config.comm, CommSettings()
    names = ["algorithm", "group_size"]
    if comm.algorithm == "auto":
        # Others round buckets to the wire format, and send them during backward, on one rank as well.
        names += ["wire", *(["overlap"] if comm.overlap == "on" else [])]
    idle = [
        f"comm.{name} = {getattr(comm, name)!r}"
        for name in names
        if getattr(comm, name) != getattr(usual, name)
    ]
    if is_idle(strategy_class(config), 1):
        idle.insert(0, f"run.strategy = {config.run.strategy!r}")
    return idle


def _when(exchange: GradientExchange, fast: FastPath) -> str:
    """When buckets are sent."""
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
    advise: Advise = no_advice

    def __call__(self, guard: AbstractContextManager[None] | None = None) -> None:
        """Raises the errors of a first step. `guard` is around forward and backward."""
        with self._as_first_step():
            self._run(guard or nullcontext())

    @contextmanager
    def _as_first_step(self) -> Iterator[None]:
        """Restores the buffers of a user's model; what is raised inside is an error of the first step."""
        try:
            with restored_buffers(self.foreign) if self.foreign else nullcontext():
                yield
        except Exception as error:  # a defect of the program is raised again
            fault = step_error(
                error, 0, self.images[0], foreign=self.foreign is not None, advise=self.advise
            )
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
        with self._as_first_step():
            self._check_loss(model, mixes)
        return self.loss

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
                self.loss.in_evaluation = takes_evaluation(
                    self.loss, model, self.normalize, self.policy, self.images
                )
        self.batch_norm.discard_if(torch.ones((), device=device))

    def _total(self, outputs: Any, *, mixes: bool) -> Tensor:
        own = torch.ones(self.images[0], device=self.policy.device) if mixes else None
        return self.loss.total(outputs, self._labels(self.images[0]), own)

    def _labels(self, samples: int) -> Tensor:
        return torch.zeros(samples, dtype=torch.int64, device=self.policy.device)
