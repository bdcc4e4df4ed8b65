"""The room starts fast: `paceline report` on a login node must not wait for torch."""

import subprocess
import sys


def test_neither_torch_nor_numpy_nor_rich_is_imported() -> None:
    code = "import sys, paceline.report; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
    ).stdout.split()
    assert "paceline.report.run_page" in loaded
    assert {"torch", "numpy", "rich", "typer"}.isdisjoint(loaded)
