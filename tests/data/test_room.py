"""What the room shows to others, and what it costs to enter."""

from __future__ import annotations

import subprocess
import sys

import pytest

import paceline.data


def test_every_public_name_is_there() -> None:
    for name in paceline.data.__all__:
        assert getattr(paceline.data, name).__name__ == name
    assert sorted(paceline.data.__all__) == sorted(paceline.data._HOMES)


def test_unknown_names_fail_as_usual() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Loader'"):
        paceline.data.Loader  # noqa: B018


@pytest.mark.parametrize("module", ["settings", "sources.source", "sample_reader", "batch_plan"])
def test_torch_is_not_imported(module: str) -> None:
    code = f"import sys, paceline.data.{module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
