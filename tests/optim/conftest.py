from __future__ import annotations

import pytest

from paceline.optim import adam, lars, state


@pytest.fixture(params=["in place", "by select"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list operations as on a CPU, and as on a GPU, where no flag is read."""
    if request.param == "by select":
        for module in (adam, lars, state):
            monkeypatch.setattr(module, "on_host", lambda device: False)
