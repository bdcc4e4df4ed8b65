"""Training runs: build, step, loop, evaluation, checkpoints and the run folder."""

from __future__ import annotations

from paceline.core import lazy_exports

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Checkpoint": "checkpoint",
        "CheckpointStore": "checkpoint",
        "EvalResult": "evaluate",
        "Progress": "run_state",
        "RunOutcome": "run",
        "StopSignals": "stop_signals",
        "TrainStep": "step",
        "Training": "build",
        "checkpoint_weights": "weights",
        "evaluate_file": "evaluate",
        "find_checkpoint": "checkpoint",
        "fingerprint": "weights",
        "master_weights": "weights",
        "resolve_batch_sizes": "batch_sizes",
        "run_training": "run",
        "write_weights": "weights",
    },
)
