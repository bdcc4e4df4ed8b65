from __future__ import annotations

import pytest
import torch

from paceline.core.errors import RunError
from paceline.train.machine import explain_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to …"),
        MemoryError(),
    ],
)
def test_what_lacks_memory_says_so_with_the_remedy(error: Exception) -> None:
    told = memory_error(error, "at step 3", "use a smaller --batch-size")
    assert str(told) == "out of memory at step 3; use a smaller --batch-size"


def test_the_real_allocator_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert memory_error(caught.value, "here", "less") is not None


def test_other_errors_are_left_alone() -> None:
    assert memory_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "", "") is None


def test_within_the_context_the_lack_is_told_and_other_errors_pass_as_they_are() -> None:
    lack, other = torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("shapes")
    with (
        pytest.raises(RunError, match="^out of memory here; less$") as told,
        explain_out_of_memory("here", "less"),
    ):
        raise lack
    assert told.value.__cause__ is lack
    with (
        pytest.raises(RuntimeError, match="shapes") as passed,
        explain_out_of_memory("here", "less"),
    ):
        raise other
    assert passed.value is other
    assert passed.value.__cause__ is None
