from __future__ import annotations

import pytest

import make_plots as tool


@pytest.mark.parametrize("name", tool.PLOTS)
def test_a_plot_is_what_its_record_says(name: str) -> None:
    assert (tool.IMAGES / name).read_text("utf-8") == tool.PLOTS[name](), "run `make docs-plots`"
