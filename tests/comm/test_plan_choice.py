"""The plan that a run executes, and the order of its gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from comm.exchanges import joined
from paceline.comm.plan_choice import PlanChoice, agree_order, record_order
from paceline.comm.settings import CommSettings
from paceline.core.errors import ConfigError
from paceline.core.settings import from_table
from paceline.plan.fusion_plan import TensorSpec
from paceline.plan.plan_file import ClusterFacts, ModelFacts, PlanFile, ProbedCluster
from paceline.plan.size_table import MeasuredSize, SizeRow, SizeTable
from ranks import run_ranks

TENSORS = (
    TensorSpec("a", (100,)), TensorSpec("b", (2000,)), TensorSpec("c", (30,)),
    TensorSpec("d", (400,)),
)  # fmt: skip
ORDER = ("d", "c", "b", "a")
FOUR = ClusterFacts(4, 2)
KIB = 1 / 1024


def choose(tensors: tuple[TensorSpec, ...] = TENSORS, **settings: object) -> PlanChoice:
    return PlanChoice.read(from_table(CommSettings, "comm", settings), tensors, FOUR)


def test_what_fits_one_bucket_needs_no_order() -> None:
    plan = choose().fixed
    assert plan is not None
    assert [b.tensors for b in plan.buckets] == [ORDER]
    assert (plan.buckets[0].algorithm, plan.buckets[0].wire) == ("native", "auto")
    assert choose(fusion_mib=KIB).fixed is None


def test_a_process_alone_has_one_bucket_unless_it_asks() -> None:
    alone = ClusterFacts(1, 1)
    small = CommSettings(fusion_mib=0.0)
    assert PlanChoice.read(small, TENSORS, alone).fixed is not None
    asked = CommSettings(fusion_mib=0.0, algorithm="tree")
    assert PlanChoice.read(asked, TENSORS, alone).fixed is None


def test_each_bucket_goes_by_its_bytes_on_the_wire() -> None:
    choice = choose(fusion_mib=1.5 * KIB, algorithm="hybrid", hybrid={"sizes": "4"})
    assert [(b.tensors, b.algorithm) for b in choice.plan(ORDER).buckets] == [
        (("d",), "hierarchical"), (("c", "b"), "ring"), (("a",), "hierarchical"),
    ]  # fmt: skip
    # Half the bytes: more tensors to a bucket, and each bucket is a smaller one.
    half = choose(fusion_mib=1.5 * KIB, algorithm="hybrid", hybrid={"sizes": "5"}, wire="float16")
    assert [(b.tensors, b.algorithm, b.wire) for b in half.plan(ORDER).buckets] == [
        (("d", "c", "b"), "hierarchical", "float16"), (("a",), "hierarchical", "float16"),
    ]  # fmt: skip


def test_a_table_is_read_from_its_file(tmp_path: Path) -> None:
    SizeTable((SizeRow("tree", 1700), SizeRow("torus2d"))).write(tmp_path / "sizes.toml")
    choice = choose(
        fusion_mib=0.0, algorithm="hybrid", hybrid={"sizes": str(tmp_path / "sizes.toml")}
    )
    assert [b.algorithm for b in choice.plan(ORDER).buckets] == ["tree", "tree", "torus2d", "tree"]
    # A file of `paceline tune` without a model is a table, too.
    choice = choose(plan=str(tmp_path / "sizes.toml"))
    assert choice.fixed is not None
    assert [b.algorithm for b in choice.fixed.buckets] == ["torus2d"]
    with pytest.raises(ConfigError, match="comm.hybrid.sizes = .*none.toml.*cannot be read"):
        choose(algorithm="hybrid", hybrid={"sizes": str(tmp_path / "none.toml")})


# Larger messages are slower than this machine's, so that all buckets differ.
LARGE = (
    TensorSpec("late", (8 << 20,)),
    TensorSpec("middle", (1 << 20,)),
    TensorSpec("early", (8,)),
)


def constants(ratio: float, backend: str = "gloo") -> PlanFile:
    """`hierarchical` takes `ratio` times as long as `native` from 1 MiB on, and twice as long below."""
    probed = ProbedCluster((2, 2), backend, "cpu")
    measured = tuple(
        MeasuredSize(size, {"native": size * 1e-8, "hierarchical": factor * size * 1e-8})
        for size, factor in ((16 << 10, 2.0), (1 << 20, ratio), (16 << 20, ratio))
    )
    return PlanFile(cluster=FOUR, probed=probed, measured=measured)


@pytest.mark.parametrize(
    ("ratio", "backend", "settings", "algorithms"),
    [
        # Buckets of 4 MiB cost nothing. The last one has 32 bytes.
        (0.5, "gloo", {}, ["hierarchical", "hierarchical", "native"]),
        (0.5, "nccl", {}, ["hierarchical", "hierarchical", "native"]),
        # Native is within the margin.
        (0.97, "gloo", {}, ["native", "native"]),
        (0.85, "gloo", {}, ["hierarchical", "hierarchical", "native"]),
        (0.85, "nccl", {}, ["native", "native"]),
        (0.5, "gloo", {"algorithm": "tree"}, ["tree", "tree"]),
        (0.5, "gloo", {"fusion_mib": 64.0}, ["hierarchical"]),
    ],
)
def test_auto_chooses_by_constants(
    ratio: float, backend: str, settings: dict[str, object], algorithms: list[str]
) -> None:
    made = from_table(CommSettings, "comm", settings)
    order = ("late", "middle", "early")
    plans = []
    file = constants(ratio, backend)
    for known in (file, PlanFile.from_tables(file.constants(), Path("again"), "comm.algorithm")):
        choice = PlanChoice.read(made, LARGE, FOUR, known)
        assert choice.fixed is None or "fusion_mib" in settings
        plans.append(choice.plan(order))
    assert plans[0] == plans[1], "equal constants must give equal plans"
    assert [bucket.algorithm for bucket in plans[0].buckets] == algorithms


@pytest.mark.parametrize(("ratio", "algorithm"), [(0.85, "native"), (0.7, "hierarchical")])
def test_on_one_node_auto_needs_a_clear_winner(ratio: float, algorithm: str) -> None:
    file = replace(constants(ratio), probed=ProbedCluster((4,), "gloo", "cpu"))
    plan = PlanChoice.read(CommSettings(), LARGE, ClusterFacts(4, 1), file).plan(
        ("late", "middle", "early")
    )
    assert plan.buckets[0].algorithm == algorithm


def test_auto_without_constants_is_native() -> None:
    plan = PlanChoice.read(CommSettings(), LARGE, FOUR).plan(("late", "middle", "early"))
    assert {bucket.algorithm for bucket in plan.buckets} == {"native"}


def test_a_table_of_another_cluster_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sizes.toml"
    for ranks, nodes in ((4, 2), (16, 4), (4, 1)):
        SizeTable.single("tree").write(file)
        with file.open("a") as more:
            more.write(f"[cluster]\nranks = {ranks}\nnodes = {nodes}\n")
        if (ranks, nodes) == (4, 2):
            assert choose(
                algorithm="hybrid", hybrid={"sizes": str(file)}
            ).table == SizeTable.single("tree")
            continue
        for settings in (
            {"algorithm": "hybrid", "hybrid": {"sizes": str(file)}},
            {"plan": str(file)},
        ):
            with pytest.raises(ConfigError, match=f"tuned on {ranks} ranks of {nodes} nodes"):
                choose(**settings)


def test_a_plan_file_decides_all(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    plan = choose(fusion_mib=KIB, algorithm="hybrid", hybrid={"sizes": "5"}).plan(ORDER)
    model = ModelFacts.of((spec.name, spec.length) for spec in TENSORS)
    PlanFile(plan, model, FOUR).write(path)
    assert choose(plan=str(path)).fixed == plan
    with pytest.raises(ConfigError, match="is for a model with 4 tensors of 2,530 elements"):
        choose(TENSORS[:3], plan=str(path))
    with pytest.raises(ConfigError, match="is for a cluster with ranks = 4, nodes = 2, but this"):
        PlanChoice.read(CommSettings(plan=str(path)), TENSORS, ClusterFacts(2, 1))
    for old, new, words in (
        ("hierarchical", "hierarchic", "bucket 1: algorithm = 'hierarchic': unknown algorithm"),
        ("auto", "fp12", "bucket 1: wire = 'fp12': unknown"),
        ('"d"', '"e"', "plan: lacks d"),
    ):
        text = path.read_text()
        path.write_text(text.replace(old, new))
        with pytest.raises(ConfigError) as caught:
            choose(plan=str(path))
        assert words in str(caught.value)
        path.write_text(text)


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=30), st.integers(0, 20), st.integers(1, 30)
)
def test_every_tensor_travels_once_in_the_order_given(
    lengths: list[int], fusion_kib: int, eta_kib: int
) -> None:
    tensors = tuple(TensorSpec(f"t{i}", (n,)) for i, n in enumerate(lengths))
    choice = choose(
        tensors, fusion_mib=fusion_kib * KIB, algorithm="hybrid", hybrid={"sizes": str(eta_kib)}
    )
    order = tuple(spec.name for spec in reversed(tensors))
    plan = choice.plan(order)
    plan.check(order)
    assert plan.tensors == order
    sizes = {spec.name: 4 * spec.length for spec in tensors}
    for bucket in plan.buckets[:-1]:
        held = [sizes[name] for name in bucket.tensors]
        assert sum(held) >= fusion_kib * 1024
        assert sum(held[:-1]) < max(1, fusion_kib * 1024)
    for bucket in plan.buckets:
        large = sum(sizes[name] for name in bucket.tensors) >= 1024 * eta_kib
        assert bucket.algorithm == ("ring" if large else "hierarchical")


class Crossed(nn.Module):
    """Declares layers against their order of use; `tied` is used first and last, `idle` never."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.tied, self.idle = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.ice = nn.Linear(4, 4, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.last(self.ice(self.first(self.tied(x)))))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def test_the_order_is_that_of_arrival() -> None:
    model = Crossed()
    order = record_order(trained(model), lambda: model(torch.ones(2, 4)).sum().backward())
    # The tied weight is whole only when backward has reached its first use.
    assert order == ("last.weight", "first.weight", "tied.weight", "idle.weight")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_is_left_behind_where_backward_fails() -> None:
    model = Crossed()

    def fails() -> None:
        model(torch.ones(2, 4)).sum().backward()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        record_order(trained(model), fails)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def _agreed(rank: int) -> tuple[str, ...]:
    with joined() as group:
        return agree_order(group, ("a", "ü") if rank == 0 else ("ü", "a"))


def test_rank_zero_decides() -> None:
    assert run_ranks(2, _agreed) == [("a", "ü")] * 2
