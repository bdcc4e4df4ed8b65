"""Paceline: synchronous data-parallel training of image models at very large batches.

    import paceline as pl

    pl.Trainer("resnet18", "photos/", epochs=20).fit()

Names load on first use: `import paceline` imports neither torch nor CUDA. docs/api.md says what is
stable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import lazy_exports
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.comm.hybrid import HybridAllReduce
    from paceline.core.errors import (
        CheckpointError,
        CommError,
        ConfigError,
        DataError,
        PacelineError,
        RunError,
    )
    from paceline.core.events import (
        CheckpointEvent,
        EvalEvent,
        MetricEvent,
        StartEvent,
        StepEvent,
        StopEvent,
    )
    from paceline.data import DatasetSource, ImageLoader, Source
    from paceline.models import create_model, parameter_groups
    from paceline.optim import LARS, SGD, Muon
    from paceline.plan.size_table import SizeTable
    from paceline.train.callbacks import Callback, EarlyStopping, RunControl
    from paceline.train.inference import Prediction, Predictor
    from paceline.trainer import Result, Trainer

_MODULES = {
    "comm.hybrid": "HybridAllReduce",
    "core.errors": "CheckpointError CommError ConfigError DataError PacelineError RunError",
    "core.events": "CheckpointEvent EvalEvent MetricEvent StartEvent StepEvent StopEvent",
    "data": "DatasetSource ImageLoader Source",
    "models": "create_model parameter_groups",
    "optim": "LARS Muon SGD",
    "plan.size_table": "SizeTable",
    "train.callbacks": "Callback EarlyStopping RunControl",
    "train.inference": "Prediction Predictor",
    "trainer": "Result Trainer",
}
__all__ = [
    "LARS", "SGD", "Callback", "CheckpointError", "CheckpointEvent", "CommError", "ConfigError",
    "DataError", "DatasetSource", "EarlyStopping", "EvalEvent", "HybridAllReduce", "ImageLoader",
    "MetricEvent", "Muon", "PacelineError", "Prediction", "Predictor", "Result", "RunControl",
    "RunError", "SizeTable", "Source", "StartEvent", "StepEvent", "StopEvent", "Trainer",
    "__version__", "create_model", "parameter_groups",
]  # fmt: skip
__getattr__, __dir__ = lazy_exports(
    __name__,
    {name: f"paceline.{module}" for module, names in _MODULES.items() for name in names.split()},
)
