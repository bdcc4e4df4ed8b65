from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.data.loader import EvalLoader
from paceline.data.loader_protocol import EvalBatches, TrainBatches
from paceline.data.settings import DataSettings


def test_a_loader_can_be_told_from_a_list(
    memory_source: Any, small_settings: Callable[..., DataSettings]
) -> None:
    loader = EvalLoader(memory_source(3), small_settings(), rank=0, world_size=1, batch_size=2)
    assert isinstance(loader, EvalBatches)
    assert not isinstance(loader, TrainBatches)
    assert not isinstance([], EvalBatches)
