from __future__ import annotations

import write_settings_reference as tool
from paceline.config import setting_names


def test_the_page_is_what_the_code_says() -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.render(), "run `make docs`"


def test_every_setting_is_listed_once() -> None:
    page = tool.render().split("## Common settings")[1]
    lines = [line for line in page.splitlines() if line.startswith("- `")]
    assert len(lines) == len(setting_names())
