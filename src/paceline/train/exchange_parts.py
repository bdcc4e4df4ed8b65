"""The exchange of a run: plan, carrier and memory, settled among all ranks.

In: the settings, the model, a way to try its backward pass, and perhaps a checkpoint's plan. Out: the
`GradientExchange`, and words for what was chosen. Whatever one rank cannot do, or does otherwise, ends
all ranks with one line before the first collective that it would break.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from paceline.comm.create_carrier import create_carrier
from paceline.comm.flat_gradients import tensor_spec
from paceline.comm.gradient_exchange import GradientExchange
from paceline.comm.group import Group
from paceline.comm.plan_choice import PlanChoice, agree_order, record_order
from paceline.comm.settings import CommSettings
from paceline.core.errors import CheckpointError, ConfigError
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.plan_file import ClusterFacts, Expected, ModelFacts, PlanFile
from paceline.train.machine import memory_told
from paceline.train.pinned_plan import PinnedPlan


@dataclass(frozen=True)
class ExchangeParts:
    """What all ranks have agreed upon, before there is any memory for it."""

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
        return any(buffer.wire == "float16" for buffer in self.plan.buffers)

    def create(self, group: Group, *, accumulate: bool, graphs: bool) -> GradientExchange:
        """Process groups, thread and memory. `graphs`: micro-steps are recorded."""
        carrier = create_carrier(group, self.settings, self.plan)
        wanted = self.settings.overlap
        overlap = wanted == "on" or (wanted == "auto" and (not graphs or carrier.recordable))

        def make() -> GradientExchange:
            where = f"with the gradients' buffers on {group.device}"
            with memory_told(where, "free memory, or choose a smaller model"):
                return GradientExchange(
                    self.trained.items(), group, self.plan, accumulate=accumulate,
                    carrier=carrier, overlap=overlap,
                )  # fmt: skip

        return group.settled("exchange", make)


def plan_exchange(
    settings: CommSettings, model: nn.Module, group: Group, backward: Callable[[], None],
    pinned: PinnedPlan | None = None,
) -> ExchangeParts:  # fmt: skip
    """Reads, probes where the order matters, and makes sure that all ranks have one plan."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tensors = tuple(tensor_spec(name, p) for name, p in trained.items())
    facts = ModelFacts.of((spec.name, spec.length) for spec in tensors)
    group.settle(
        "parameters", facts={"the trained parameters": facts.describe()},
        remedy="build the same model on every rank",
    )  # fmt: skip
    cluster = ClusterFacts(group.world_size, _count_nodes(group))
    if pinned is not None:
        group.settled("checkpoint's tensors", lambda: _check_pinned(pinned, trained))
    if pinned is not None and pinned.whole:
        plan, origin = pinned.plan, "as in the checkpoint"
    else:
        choice = group.settled("plan", lambda: PlanChoice.read(settings, tensors, cluster))
        origin = f"plan {settings.plan}" if settings.plan else ""
        if choice.fixed is not None:
            plan = choice.fixed
        elif pinned is not None:
            order = pinned.plan.tensors
            plan, origin = choice.plan(order), "order as in the checkpoint"
        else:
            order = group.settled("gradient order", lambda: record_order(trained, backward))
            plan = choice.plan(agree_order(group, order))
    group.settled("plan fits", lambda: _checked(plan, trained))
    group.settle("fusion plan", facts={"the fusion plan": plan.fingerprint})
    file = PlanFile(plan, facts, cluster, _expected(settings, plan))
    return ExchangeParts(settings, file, trained, origin)


def _expected(settings: CommSettings, plan: FusionPlan) -> Expected | None:
    """What the planner said of this very plan, for the report; nothing that a run depends on."""
    if not settings.plan:
        return None
    try:
        file = PlanFile.read(Path(settings.plan))
    except ConfigError:
        return None
    return file.expected if file.plan == plan else None


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
    """`7 buffers of 84 KiB to 20.4 MiB, ring (5), hierarchical (2), float16 wire, overlapped`."""
    sizes = [sum(message.wire_bytes for message in buffer) for buffer in exchange.messages]
    span = f"{len(sizes)} buffers of {_shown(min(sizes))} to {_shown(max(sizes))}"
    count = span if len(sizes) > 1 else f"1 buffer of {_shown(sizes[0])}"
    names = [buffer.algorithm for buffer in parts.plan.buffers]
    many = len(set(names)) > 1
    ways = [f"{n} ({names.count(n)})" if many else n for n in dict.fromkeys(names)]
    wires = [f"{w} wire" for w in dict.fromkeys(b.wire for b in parts.plan.buffers) if w != "auto"]
    origin = [f"({parts.origin})"] if parts.origin else []
    return " ".join([", ".join([count, *ways, *wires, moment]), *origin])


def _shown(size: int) -> str:
    return f"{size / 2**20:.3g} MiB" if size >= 2**20 else f"{size / 2**10:.3g} KiB"
