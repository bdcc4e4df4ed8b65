from __future__ import annotations

import pytest

from paceline.optim import rule


@pytest.fixture(params=["in place", "by select"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the list operations as on a CPU, and as on a GPU, where no flag is read."""
    if request.param == "by select":
        monkeypatch.setattr(rule, "on_host", lambda device: False)
