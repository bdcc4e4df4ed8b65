from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.core.errors import ConfigError
from paceline.core.events import EvalEvent, NoteEvent, StepEvent
from paceline.train.tracing import TensorBoardWriter


def test_the_scalars_can_be_read_back(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, 0)
    writer.on_event(StepEvent(3, 0.5, 1.25, 0.1, 900.0, 0.1, 0.0))
    writer.on_event(EvalEvent(3, 0.5, 87.5, 99.0, 0.5, 2000, 0.7))
    writer.on_event(NoteEvent("not a number"))
    writer.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    values = {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    assert values["train/loss"] == [(3, 1.25)]
    assert values["train/images_per_s"] == [(3, 900.0)]
    assert values["val/top1"] == [(3, 87.5)]
    assert values["val/loss"] == [(3, 0.5)]


def test_without_the_extra_a_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[tensorboard\]'"):
        TensorBoardWriter(tmp_path, 0)
