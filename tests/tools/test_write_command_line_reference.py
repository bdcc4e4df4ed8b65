from __future__ import annotations

import write_command_line_reference as tool


def test_the_page_is_what_the_commands_say() -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.render(), "run `make docs`"


def test_every_option_is_listed() -> None:
    page = tool.render()
    for name, command in tool.commands():
        assert f"\n## {name}\n" in page
        for parameter in command.params:
            if not getattr(parameter, "hidden", False):
                assert tool.item(parameter) in page
