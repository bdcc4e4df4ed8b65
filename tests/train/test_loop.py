from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import PacelineError
from paceline.core.events import read_events
from paceline.data.loader import EvalLoader, TrainLoader
from paceline.train import loop
from small_runs import run_small


def test_remarks_of_both_loaders_are_told_once_also_where_an_error_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainLoader, "remark", lambda self: "3 on the host")
    monkeypatch.setattr(EvalLoader, "remark", lambda self: "2 on the host")
    evaluate, calls = loop.evaluate, []

    def twice(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) > 2:
            raise PacelineError("the disk is gone")
        return evaluate(*arguments)

    monkeypatch.setattr(loop, "evaluate", twice)
    with pytest.raises(PacelineError, match="the disk is gone"):
        run_small(tmp_path / "run", run__epochs=3, data__synthetic_samples=16)
    events = list(read_events(tmp_path / "run/metrics.jsonl"))
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert notes == ["evaluation: 2 on the host", "3 on the host"]
