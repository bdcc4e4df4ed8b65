"""A wire format in a file outside of the package: its cost, and its own all-reduce."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from comm.exchanges import joined
from paceline.comm.executor import Staging
from paceline.comm.process_groups import ProcessGroups
from paceline.comm.settings import CommSettings
from paceline.comm.transport import Piece, create_transport
from paceline.core.errors import ConfigError
from paceline.plan import FusionPlan, PlanFile
from paceline.plan.cluster import Cluster, Link
from paceline.plan.fusion_plan import FusionBucket
from paceline.plan.optimizer import Gradient, best_plan
from paceline.plan.wires import Wire, register_wire, wire_bytes, wire_names
from paceline.planner.workload import Affine, Workload
from paceline.train.exchange_plan import ExchangeParts
from ranks import run_ranks
from refusals import refused


class Tenths:
    """Sums whole tenths in 16 bits."""

    def __init__(
        self, groups: ProcessGroups, staging: Staging, settings: CommSettings | None,
        wires: Sequence[str],
    ) -> None:  # fmt: skip
        self._groups = groups

    def run(self, buffer: Tensor, wire: str) -> None:
        tenths = buffer.mul(10).round_().to(torch.int32)
        dist.all_reduce(tenths, group=self._groups.world)
        buffer.copy_(tenths.float().div_(10))


TENTHS = Wire(
    "tenths", bits=16, algorithm="sum_of_tenths", cost=lambda c, m: m * c.slowest.beta_s, casts=1,
    create=Tenths, roundoff=0.05,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _registered(registrations: None) -> None:
    register_wire(TENTHS)


def test_it_is_priced_by_what_it_declares() -> None:
    slow = Cluster(4, 1, Link(0, 0), Link(1e-5, 1e-8), cast_s=1e-10)
    gradients = tuple(Gradient(f"w{i}", 100_000, False, (i + 1) / 3) for i in range(3))
    work = Workload("net", gradients, Affine(0, 1e-9), Affine(4e-3, 0), 0.0)
    plan = best_plan(work, slow, 1, wires=("auto", "tenths"))
    assert ("tenths", "sum_of_tenths") in {(b.wire, b.algorithm) for b in plan.buckets}
    dearer = dataclasses.replace(TENTHS, casts=1e6)
    register_wire(dearer)
    plan = best_plan(work, slow, 1, wires=("auto", "tenths"))
    assert {bucket.wire for bucket in plan.buckets} == {"auto"}
    assert wire_bytes(5, "float32", "tenths") == 10
    assert wire_names(["tenths", "fp16"]) == ("float16", "tenths")


def test_names_and_combinations_are_checked() -> None:
    assert CommSettings(wire="tenths").wire == "tenths"
    for values in ({"wire": "ninths"}, {"wire": "tenths", "algorithm": "ring"}):
        with pytest.raises(ConfigError):
            CommSettings(**values)
    for name in ("float16", "int8", "Tenths", "a-b"):
        with pytest.raises(ConfigError):
            register_wire(dataclasses.replace(TENTHS, name=name))


@pytest.mark.parametrize("field", ["bits", "algorithm", "cost", "create"])
def test_what_no_rank_could_send_is_refused(field: str) -> None:
    with refused(f"less.{field}"):
        register_wire(
            dataclasses.replace(TENTHS, name="less", **{field: 0 if field == "bits" else ""})
        )


@pytest.mark.parametrize("small_range", [False, True])
def test_losses_are_scaled_for_a_format_of_small_range(small_range: bool) -> None:
    register_wire(dataclasses.replace(TENTHS, small_range=small_range))
    plan = FusionPlan((FusionBucket(("a",), "sum_of_tenths", "tenths", "native"),))
    file = PlanFile(plan, None, None, None)
    assert ExchangeParts(CommSettings(), file, {}, "").fp16_travels is small_range


def _sums(rank: int) -> list[float]:
    register_wire(TENTHS)
    with joined() as group:
        plan = FusionPlan((FusionBucket(("a",), "sum_of_tenths", "tenths", "native"),))
        transport: Any = create_transport(group, CommSettings(wire="tenths"), plan)
        buffer = torch.tensor([0.12 + rank, 1.0])
        transport.send([Piece(buffer, "sum_of_tenths", "tenths")], lambda: None, lambda: None)()
        transport.close()
    return buffer.tolist()


def test_ranks_sum_in_it() -> None:
    for found in run_ranks(2, _sums):
        assert found == pytest.approx([1.2, 2.0])
