"""Fusion plans, and the flat layout: aligned, without overlap, in order, and nothing lost."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.plan import FusionBucket, FusionPlan
from paceline.plan.fusion_plan import FlatLayout, TensorSpec

PLAN = FusionPlan(
    (FusionBucket(("fc.weight", "fc.bias"), "ring", "float16"), FusionBucket(("conv.weight",)))
)


def test_a_plan_survives_its_table() -> None:
    again = FusionPlan.from_table(json.loads(json.dumps(PLAN.to_table())))
    assert again == PLAN
    assert again.fingerprint == PLAN.fingerprint


def test_the_fingerprint_sees_order_algorithm_and_format() -> None:
    others = [
        FusionPlan(PLAN.buckets[::-1]),
        FusionPlan((FusionBucket(("fc.weight", "fc.bias"), "ring"), PLAN.buckets[1])),
        FusionPlan((FusionBucket(("fc.bias", "fc.weight"), "ring", "float16"), PLAN.buckets[1])),
    ]
    assert len({plan.fingerprint for plan in [PLAN, *others]}) == 4


@pytest.mark.parametrize(
    ("names", "word"),
    [
        (("fc.weight", "fc.bias"), "names unknown conv.weight"),
        (("fc.weight", "fc.bias", "conv.weight", "bn.weight"), "lacks bn.weight"),
    ],
)
def test_a_plan_of_another_model_is_refused(names: tuple[str, ...], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        PLAN.check(names)


def test_a_tensor_planned_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="repeats a"):
        FusionPlan.single(("a", "a")).check(("a",))


def test_a_table_of_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a plan with buckets"):
        FusionPlan.from_table({"buffer": [{"tensors": ["a"]}]})


def test_a_pool_is_closed_once_it_holds_the_threshold() -> None:
    sizes = [("d", 4), ("c", 6), ("b", 30), ("a", 1)]

    def pools(threshold: int) -> list[tuple[str, ...]]:
        return [bucket.tensors for bucket in FusionPlan.by_threshold(sizes, threshold).buckets]

    assert pools(1) == [("d",), ("c",), ("b",), ("a",)]
    assert pools(10) == [("d", "c"), ("b",), ("a",)]
    assert pools(11) == [("d", "c", "b"), ("a",)]
    assert pools(1000) == [("d", "c", "b", "a")]
    plan = FusionPlan.by_threshold(sizes, 10, "ring", "float16")
    assert {(b.algorithm, b.wire) for b in plan.buckets} == {("ring", "float16")}
    plan.check(["a", "b", "c", "d"])


shapes = st.lists(
    st.lists(st.integers(min_value=0, max_value=70), max_size=4).map(tuple), max_size=20
)


def specs_of(shapes: list[tuple[int, ...]]) -> list[TensorSpec]:
    return [TensorSpec(f"tensor{i}", shape) for i, shape in enumerate(shapes)]


@given(shapes)
def test_slots_are_aligned_ordered_and_apart(shapes: list[tuple[int, ...]]) -> None:
    specs = specs_of(shapes)
    layout = FlatLayout.build(specs)
    assert [slot.name for slot in layout.slots] == [spec.name for spec in specs]
    assert [slot.stop - slot.offset for slot in layout.slots] == [spec.length for spec in specs]
    ends = [*(slot.offset for slot in layout.slots), layout.length]
    assert ends[0] == 0
    assert all(end % 32 == 0 for end in ends)
    for slot, (_, after) in zip(layout.slots, pairwise(ends), strict=True):
        assert 0 <= after - slot.stop < 32


def test_a_known_layout() -> None:
    layout = FlatLayout.build(specs_of([(), (3, 11), (32,), (0,), (5,)]))
    assert [slot.offset for slot in layout.slots] == [0, 32, 96, 128, 128]
    assert layout.length == 160
