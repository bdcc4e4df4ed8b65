from __future__ import annotations

from pathlib import Path

from interpreter_run import needs_triton, run_interpreted

CASES = Path(__file__).with_name("fused_cases.py")
pytestmark = needs_triton


def test_the_kernels_in_tritons_interpreter() -> None:
    run_interpreted(CASES, CASES.with_name("fused_muon_cases.py"), at_least=32)
