"""The fused kernels, interpreted. `test_fused_gpu.py` runs them compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from interpreter_run import needs_triton, run_interpreted

HERE = Path(__file__).parent

pytestmark = needs_triton


def test_in_tritons_interpreter() -> None:
    run_interpreted(HERE / "fused_cases.py", HERE / "product_cases.py", at_least=116)


def test_graphs_of_cudnn_in_tritons_interpreter() -> None:
    run_interpreted(HERE / "cudnn_cases.py", at_least=25)


def test_outputs_that_are_left_out_in_tritons_interpreter() -> None:
    run_interpreted(HERE / "left_out_cases.py", at_least=20)


@pytest.mark.slow
def test_nets_in_tritons_interpreter() -> None:
    run_interpreted(HERE / "fused_net_cases.py", at_least=16)
