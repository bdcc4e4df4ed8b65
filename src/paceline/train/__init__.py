"""Training runs: build, step, loop, evaluation, checkpoints and the run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import lazy_exports

if TYPE_CHECKING:
    from paceline.train.batch_sizes import resolve_batch_sizes as resolve_batch_sizes
    from paceline.train.checkpoint import Checkpoint as Checkpoint
    from paceline.train.checkpoint import CheckpointStore as CheckpointStore
    from paceline.train.checkpoint import find_checkpoint as find_checkpoint
    from paceline.train.evaluate import EvalResult as EvalResult
    from paceline.train.evaluate import evaluate_file as evaluate_file
    from paceline.train.run import RunOutcome as RunOutcome
    from paceline.train.run import run_training as run_training
    from paceline.train.run_state import Progress as Progress
    from paceline.train.step import TrainStep as TrainStep
    from paceline.train.stop_signals import StopSignals as StopSignals
    from paceline.train.strategy import Strategy as Strategy
    from paceline.train.strategy import Synchronous as Synchronous
    from paceline.train.strategy import register_strategy as register_strategy
    from paceline.train.training import Training as Training
    from paceline.train.weights import checkpoint_weights as checkpoint_weights
    from paceline.train.weights import fingerprint as fingerprint
    from paceline.train.weights import master_weights as master_weights
    from paceline.train.weights import write_weights as write_weights

if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_exports(__name__)
