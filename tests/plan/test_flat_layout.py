"""The flat layout: aligned, without overlap, in order, and nothing lost."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.fusion_plan import FlatLayout, TensorSpec

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
