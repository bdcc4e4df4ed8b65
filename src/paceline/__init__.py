"""Paceline: synchronous data-parallel training of image models at very large batches.

    import paceline as pl

    pl.Trainer("resnet18", "photos/", epochs=20).fit()

Names are imported on first use: `import paceline` imports neither torch nor CUDA. docs/api.md lists the
stable names.
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
    from paceline.custom_loop.accelerated import Accelerated, accelerate
    from paceline.custom_loop.checkpointer import Checkpointer
    from paceline.custom_loop.context import Context, init
    from paceline.custom_loop.data_parallel import DataParallel
    from paceline.custom_loop.prepared import Prepared, prepare
    from paceline.data import CorruptImage, DatasetSource, ImageLoader, Source, register_source
    from paceline.models import (
        ModelSettings,
        create_model,
        parameter_groups,
        register_acceleration,
        register_model,
    )
    from paceline.optim import (
        LAMB,
        LARS,
        SGD,
        AdamW,
        Muon,
        register_optimizer,
        register_schedule,
    )
    from paceline.plan import register_wire
    from paceline.plan.size_table import SizeTable
    from paceline.planner.scaling import ScalingPrediction, predict_scaling
    from paceline.train import register_strategy
    from paceline.train.callbacks import Callback, EarlyStopping, RunControl
    from paceline.train.inference import Prediction, Predictor
    from paceline.trainer import Result, Trainer

__all__ = [
    "LAMB", "LARS", "SGD", "Accelerated", "AdamW", "Callback", "CheckpointError", "CheckpointEvent",
    "Checkpointer", "CommError", "ConfigError", "Context", "CorruptImage", "DataError", "DataParallel",
    "DatasetSource", "EarlyStopping", "EvalEvent", "HybridAllReduce", "ImageLoader", "MetricEvent",
    "ModelSettings",
    "Muon", "PacelineError", "Prediction", "Predictor", "Prepared", "Result", "RunControl", "RunError",
    "ScalingPrediction", "SizeTable", "Source", "StartEvent", "StepEvent", "StopEvent", "Trainer",
    "__version__", "accelerate", "create_model", "init", "parameter_groups", "predict_scaling", "prepare",
    "register_acceleration", "register_model", "register_optimizer", "register_schedule",
    "register_source", "register_strategy", "register_wire",
]  # fmt: skip
if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_exports(__name__)
