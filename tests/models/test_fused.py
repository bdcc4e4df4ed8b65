"""The fused kernels, interpreted. `test_fused_gpu.py` runs them compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from interpreter_run import needs_triton, run_interpreted

HERE = Path(__file__).parent

pytestmark = needs_triton


@pytest.mark.parametrize(
    ("file", "cases"),
    [
        ("fused_cases.py", 90),
        ("product_cases.py", 18),
        pytest.param("fused_net_cases.py", 9, marks=pytest.mark.slow),
    ],
)
def test_in_tritons_interpreter(file: str, cases: int) -> None:
    run_interpreted(HERE / file, cases)
