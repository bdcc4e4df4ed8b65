"""Plots and references are what records and code say."""

from __future__ import annotations

from typing import Any

import pytest

import make_plots as plots
import write_command_line_reference as commands
import write_settings_reference as settings
from paceline.config import setting_names


@pytest.mark.parametrize("name", plots.PLOTS)
def test_a_plot_is_what_its_record_says(name: str) -> None:
    assert (plots.IMAGES / name).read_text("utf-8") == plots.PLOTS[name](), "run `make docs-plots`"


@pytest.mark.parametrize("tool", [commands, settings])
def test_the_page_is_what_the_code_says(tool: Any) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.render(), "run `make docs`"


def test_every_option_is_listed() -> None:
    page = commands.render()
    for name, command in commands.commands():
        assert f"\n## {name}\n" in page
        for parameter in command.params:
            if not getattr(parameter, "hidden", False):
                assert commands.item(parameter) in page


def test_every_setting_is_listed_once() -> None:
    page = settings.render().split("## Common settings")[1]
    lines = [line for line in page.splitlines() if line.startswith("- `")]
    assert len(lines) == len(setting_names())
