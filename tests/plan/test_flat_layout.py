"""The flat layout: aligned, without overlap, in order, and nothing lost."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.fusion_plan import DEFAULT_ALIGN, FlatLayout, TensorSpec

shapes = st.lists(
    st.lists(st.integers(min_value=0, max_value=70), max_size=4).map(tuple), max_size=20
)


def specs_of(shapes: list[tuple[int, ...]], dtype: str = "float32") -> list[TensorSpec]:
    return [TensorSpec(f"tensor{i}", shape, dtype) for i, shape in enumerate(shapes)]


@given(shapes, st.integers(min_value=1, max_value=130))
def test_slots_are_aligned_ordered_and_apart(shapes: list[tuple[int, ...]], align: int) -> None:
    specs = specs_of(shapes)
    layout = FlatLayout.build(specs, align=align)
    assert [slot.spec for slot in layout] == specs
    assert len(layout) == len(specs)
    assert layout.align == align
    assert all(slot.offset % align == 0 for slot in layout)
    assert layout.length % align == 0
    for slot, following in pairwise(layout):
        assert 0 <= following.offset - slot.stop < align
    if specs:
        assert layout.slots[0].offset == 0
        assert 0 <= layout.length - layout.slots[-1].stop < align


@given(shapes, st.integers(min_value=1, max_value=130))
def test_slots_and_length_count_every_element(shapes: list[tuple[int, ...]], align: int) -> None:
    layout = FlatLayout.build(specs_of(shapes), align=align)
    elements = sum(math.prod(shape) for shape in shapes)
    assert sum(slot.length for slot in layout) == elements
    assert elements <= layout.length <= elements + len(shapes) * (align - 1)


def test_a_known_layout() -> None:
    layout = FlatLayout.build(specs_of([(), (3, 11), (32,), (0,), (5,)]))
    assert [slot.offset for slot in layout] == [0, 32, 96, 128, 128]
    assert [slot.length for slot in layout] == [1, 33, 32, 0, 5]
    assert layout.length == 160
    assert layout.align == DEFAULT_ALIGN == 32


def test_the_format_is_the_tensors_own() -> None:
    assert FlatLayout.build(specs_of([(3,), (4,)], "bfloat16")).dtype == "bfloat16"


@pytest.mark.parametrize("align", [0, -8])
def test_align_below_one_fails(align: int) -> None:
    with pytest.raises(ValueError, match=f"align = {align}: must be at least 1"):
        FlatLayout.build(specs_of([(3,)]), align=align)


def test_two_formats_fail() -> None:
    specs = [TensorSpec("a", (1,), "float32"), TensorSpec("b", (1,), "float16")]
    with pytest.raises(ValueError, match="one number format") as info:
        FlatLayout.build(specs)
    assert "float16" in str(info.value)


def test_repeated_names_fail_and_are_named() -> None:
    specs = [TensorSpec(name, (1,)) for name in ("twice", "once", "twice")]
    with pytest.raises(ValueError, match="repeated") as info:
        FlatLayout.build(specs)
    assert "twice" in str(info.value)
    assert "once" not in str(info.value)


def test_a_negative_size_fails() -> None:
    with pytest.raises(ValueError, match=r"'w'.*negative"):
        TensorSpec("w", (3, -1))
