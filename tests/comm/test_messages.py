"""The pieces of the flat buffers that travel for each bucket of a plan."""

from __future__ import annotations

import pytest

from paceline.comm.exchange import Message, plan_messages
from paceline.plan import FusionBucket, FusionPlan
from paceline.plan.fusion_plan import FlatLayout, TensorSpec
from paceline.plan.wires import wire_bytes


def layouts() -> dict[str, FlatLayout]:
    half = [TensorSpec("w2", (100,), "float16"), TensorSpec("w1", (40,), "float16")]
    full = [TensorSpec("b2", (10,)), TensorSpec("b1", (33,))]
    return {"float32": FlatLayout.build(full), "float16": FlatLayout.build(half)}


def test_small_pieces_and_signals_go_by_the_algorithm_beside() -> None:
    plan = FusionPlan(
        (
            FusionBucket(("b2", "w2"), "ring", beside="tree"),
            FusionBucket(("b1", "w1"), "torus2d", "float16", "hierarchical"),
        )
    )
    first, last = plan_messages(plan, layouts(), tail=7)
    assert first == [
        Message("float32", 0, 32, "tree", "auto"), Message("float16", 0, 128, "ring", "auto"),
    ]  # fmt: skip
    # In fp16 the signals would lose their digits, so they follow in a message of their own.
    assert last == [
        Message("float32", 32, 96, "torus2d", "float16"),
        Message("float16", 128, 192, "hierarchical", "float16"),
        Message("float32", 96, 103, "hierarchical", "float32"),
    ]
    assert [message.wire_bytes for message in last] == [128, 128, 28]


@pytest.mark.parametrize("wire", ["auto", "float32"])
def test_signals_are_part_of_the_last_fp32_message(wire: str) -> None:
    plan = FusionPlan((FusionBucket(("b2", "w2", "b1", "w1"), "ring", wire),))
    ((full, half),) = plan_messages(plan, layouts(), tail=7)
    assert (full.start, full.stop, half.stop) == (0, 103, 192)
    alone = plan_messages(FusionPlan.single(()), {"float32": FlatLayout.build([])}, 6)
    assert alone == [[Message("float32", 0, 6, "native", "float32")]]


def test_bytes_on_the_wire() -> None:
    assert wire_bytes(3, "float32", "auto") == wire_bytes(3, "float16", "float32") == 12
    assert wire_bytes(3, "bfloat16", "auto") == wire_bytes(3, "float32", "float16") == 6
    assert wire_bytes(1, "float64", "auto") == 8
    # One scale for each 256 numbers that are begun.
    assert [wire_bytes(n, "float32", "int8") for n in (1, 256, 257)] == [5, 260, 265]
