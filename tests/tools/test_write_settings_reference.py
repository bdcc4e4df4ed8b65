from __future__ import annotations

import write_settings_reference as tool


def test_the_page_is_what_the_code_says() -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.render(), "run `make docs`"
