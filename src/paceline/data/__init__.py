"""The input pipeline: sources, decoding, augmentation, batches.

In: `DataSettings`. Out: batches of pixels and labels, prepared in the background. The public names are
imported when they are first used, so that reading settings does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.data.batch import Batch
    from paceline.data.batch_plan import BatchPlan
    from paceline.data.corrupt import CorruptSample
    from paceline.data.create_loader import create_eval_loader, create_train_loader
    from paceline.data.loader import EvalLoader, TrainLoader
    from paceline.data.loader_protocol import EvalBatches, TrainBatches
    from paceline.data.normalize import Normalizer
    from paceline.data.order import SampleOrder
    from paceline.data.settings import DataSettings
    from paceline.data.sources.source import Source, open_source

_HOMES = {
    "Batch": "batch",
    "BatchPlan": "batch_plan",
    "CorruptSample": "corrupt",
    "DataSettings": "settings",
    "EvalBatches": "loader_protocol",
    "EvalLoader": "loader",
    "Normalizer": "normalize",
    "SampleOrder": "order",
    "Source": "sources.source_protocol",
    "TrainBatches": "loader_protocol",
    "TrainLoader": "loader",
    "create_eval_loader": "create_loader",
    "create_train_loader": "create_loader",
    "open_source": "sources.source",
}

__all__ = [
    "Batch",
    "BatchPlan",
    "CorruptSample",
    "DataSettings",
    "EvalBatches",
    "EvalLoader",
    "Normalizer",
    "SampleOrder",
    "Source",
    "TrainBatches",
    "TrainLoader",
    "create_eval_loader",
    "create_train_loader",
    "open_source",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
