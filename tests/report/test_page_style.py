"""The style sheet loads nothing, knows light and dark, and defines each colour it uses."""

import re

from paceline.report.html import SERIES_COLOURS, STYLE


def test_nothing_is_loaded() -> None:
    for reference in ("url(", "@import", "http", "</"):
        assert reference not in STYLE


def test_every_colour_is_defined_for_light_and_dark() -> None:
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")
    dark = dark[: dark.index("* {")]
    used = set(re.findall(r"var\((--[\w-]+)\)", STYLE))
    assert used
    for part in (light, dark):
        assert used <= set(re.findall(r"(--[\w-]+):", part))


def test_brackets_match() -> None:
    assert STYLE.count("{") == STYLE.count("}")


def test_every_series_colour_can_be_drawn() -> None:
    for number in range(1, SERIES_COLOURS + 1):
        for rule in (f".chart .line.c{number} ", f".chart circle.c{number} ", f".key .c{number}:"):
            assert rule in STYLE
