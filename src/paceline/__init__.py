"""Paceline: synchronous data-parallel training of convolutional networks at very large batches.

Packages, lowest first: `core`, then `plan`, `data`, `models`, `precision`, `optim`, then `comm` and
`report`, then `config`, `train`, `custom_loop`, `bench`, `cli`. A package imports only packages below it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import lazy_exports
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.comm.hybrid import HybridAllReduce, SizeTable
    from paceline.custom_loop.checkpointer import Checkpointer
    from paceline.custom_loop.context import Context, init
    from paceline.custom_loop.data_parallel import DataParallel
    from paceline.custom_loop.prepared import Prepared, prepare
    from paceline.models.registry import parameter_groups
    from paceline.optim.lars import LARS, SGD
    from paceline.optim.muon import Muon
    from paceline.plan.scaling import ScalingPrediction, predict_scaling

__all__ = [
    "LARS",
    "SGD",
    "Checkpointer",
    "Context",
    "DataParallel",
    "HybridAllReduce",
    "Muon",
    "Prepared",
    "ScalingPrediction",
    "SizeTable",
    "__version__",
    "init",
    "parameter_groups",
    "predict_scaling",
    "prepare",
]
__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "LARS": "optim.lars",
        "SGD": "optim.lars",
        "Checkpointer": "custom_loop.checkpointer",
        "Context": "custom_loop.context",
        "DataParallel": "custom_loop.data_parallel",
        "HybridAllReduce": "comm.hybrid",
        "Muon": "optim.muon",
        "Prepared": "custom_loop.prepared",
        "ScalingPrediction": "plan.scaling",
        "SizeTable": "plan.size_table",
        "init": "custom_loop.context",
        "parameter_groups": "models.registry",
        "predict_scaling": "plan.scaling",
        "prepare": "custom_loop.prepared",
    },
)
