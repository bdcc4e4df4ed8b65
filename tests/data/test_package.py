"""The exports of the package, and the cost of importing it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import paceline.data


def test_every_public_name_is_there() -> None:
    for name in paceline.data.__all__:
        assert hasattr(paceline.data, name)
    assert set(paceline.data.__all__) <= set(dir(paceline.data))
    with pytest.raises(AttributeError, match="no attribute 'Loader'"):
        paceline.data.Loader  # noqa: B018


def test_settings_and_sources_do_not_import_torch() -> None:
    names = (
        "settings",
        "sources.layouts",
        "sources.opening",
        "image",
        "prefetch",
        "pack.inspect",
        "pack.pack",
    )
    modules = ", ".join(f"paceline.data.{name}" for name in names)
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
