"""Training runs: build, step, loop, evaluation, checkpoints and the run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import lazy_exports

if TYPE_CHECKING:
    from paceline.train.batch_sizes import resolve_batch_sizes
    from paceline.train.checkpoint import Checkpoint, CheckpointStore, find_checkpoint
    from paceline.train.evaluate import EvalResult, evaluate_file
    from paceline.train.run import RunOutcome, run_training
    from paceline.train.run_state import Progress
    from paceline.train.step import TrainStep
    from paceline.train.stop_signals import StopSignals
    from paceline.train.strategy import Strategy, Synchronous, register_strategy
    from paceline.train.training import Training
    from paceline.train.weights import (
        checkpoint_weights,
        fingerprint,
        master_weights,
        write_weights,
    )

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "EvalResult",
    "Progress",
    "RunOutcome",
    "StopSignals",
    "Strategy",
    "Synchronous",
    "TrainStep",
    "Training",
    "checkpoint_weights",
    "evaluate_file",
    "find_checkpoint",
    "fingerprint",
    "master_weights",
    "register_strategy",
    "resolve_batch_sizes",
    "run_training",
    "write_weights",
]
if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_exports(__name__)
