from __future__ import annotations

import importlib.util
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "write_settings_reference.py"


def test_the_page_is_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("write_settings_reference", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.PAGE.read_text(encoding="utf-8") == tool.render(), "run `make docs`"
