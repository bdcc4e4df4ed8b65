from __future__ import annotations

import pytest
import torch

from paceline.core.errors import DataError, RunError
from paceline.train.step_error import step_error


def compile_error(text: str) -> Exception:
    """An error of the compiler's, known by its module: importing the compiler takes seconds."""
    return type("Failed", (RuntimeError,), {"__module__": "torch._inductor.exc"})(text)


def test_our_own_errors_pass_as_they_are() -> None:
    error = DataError("the shard is gone", "bring it back")
    assert step_error(error, 3, 8) is error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
            "out of memory at step 4 with a batch size of 8 a process; use a smaller one, such as "
            "--batch-size 4; the global batch and the result stay the same",
        ),
        (
            ValueError("Expected more than 1 value per channel when training, got (1, 4, 1, 1)"),
            "a micro-batch of one sample at step 4 leaves batch norm a single value; choose a "
            "--global-batch-size or --epochs with which the last batch has more samples, or a larger "
            "--batch-size",
        ),
        (
            compile_error("backend='inductor' raised:\n\nImportError: no ninja\nSet TORCH_LOGS"),
            "torch.compile failed (ImportError: no ninja); use --compile off",
        ),
        (compile_error(""), "torch.compile failed (Failed); use --compile off"),
    ],
    ids=["memory", "single value", "compiler", "silent compiler"],
)
def test_what_a_user_can_mend_is_told_in_one_line(error: Exception, words: str) -> None:
    found = step_error(error, 3, 8)
    assert isinstance(found, RunError)
    assert str(found) == words


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("not ours")]
)
def test_a_defect_keeps_its_traceback(error: Exception) -> None:
    assert step_error(error, 3, 8) is None
