"""The state of runs in Prometheus' text format, for `/metrics` of `paceline watch`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from paceline.report.efficiency import Efficiency
from paceline.report.outcome import Outcome
from paceline.report.records import finite, middle
from paceline.report.run_files import RunFiles

# Steps whose median is the current value of a time or a speed.
_RECENT = 20

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Sample(NamedTuple):
    name: str
    value: float | None
    labels: Mapping[str, str] = {}


# Name → type and help text, in the order in which they are written.
_METRICS = {
    "paceline_up": ("gauge", "Whether the run folder can be read"),
    "paceline_step": ("gauge", "Completed steps"),
    "paceline_total_steps": ("gauge", "Steps of the whole run"),
    "paceline_epoch": ("gauge", "Completed epochs"),
    "paceline_ranks": ("gauge", "Number of ranks"),
    "paceline_finished": ("gauge", "Whether the run has finished"),
    "paceline_loss": ("gauge", "Training loss of the latest step"),
    "paceline_learning_rate": ("gauge", "Learning rate of the latest step"),
    "paceline_loss_scale": ("gauge", "Loss scale of the latest step"),
    "paceline_images_per_second": ("gauge", "Training speed, median of the latest steps"),
    "paceline_step_seconds": ("gauge", "Time of a step, median of the latest steps"),
    "paceline_exposed_communication_seconds": (
        "gauge",
        "Wait of rank 0 for the exchange in a step",
    ),
    "paceline_input_stall_seconds": ("gauge", "Wait of rank 0 for its input in a step"),
    "paceline_efficiency": ("gauge", "e of T = S · N · e, over the whole run"),
    "paceline_lost_share": ("gauge", "Share of the time that was lost, by cause"),
    "paceline_validation_top1_percent": ("gauge", "Top-1 accuracy of the latest evaluation"),
    "paceline_validation_top5_percent": ("gauge", "Top-5 accuracy of the latest evaluation"),
    "paceline_validation_loss": ("gauge", "Loss of the latest evaluation"),
    "paceline_skipped_steps_total": ("counter", "Steps skipped for gradients that are not finite"),
    "paceline_corrupt_samples_total": ("counter", "Training samples that could not be decoded"),
    "paceline_resumes_total": ("counter", "How often the run was resumed"),
    "paceline_checkpoint_step": ("gauge", "Step of the latest checkpoint"),
    "paceline_checkpoint_save_seconds": ("gauge", "Time until the latest checkpoint was in place"),
    "paceline_checkpoint_stall_seconds": ("gauge", "Time for which its save stopped the steps"),
    "paceline_last_event_timestamp_seconds": ("gauge", "Time of the latest record"),
}


def metrics_text(runs: Iterable[tuple[str, RunFiles | None]]) -> str:
    """All samples of all runs, by metric, with the label `run`. What is unknown has no sample."""
    by_metric: dict[str, list[str]] = {name: [] for name in _METRICS}
    for run_name, files in runs:
        for sample in samples(files):
            if sample.value is None or not math.isfinite(sample.value):
                continue
            labels = {"run": run_name, **sample.labels}
            shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
            by_metric[sample.name].append(f"{sample.name}{{{shown}}} {sample.value!r}")
    lines = []
    for name, found in by_metric.items():
        if found:
            kind, text = _METRICS[name]
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *found]
    return "\n".join(lines) + "\n"


def samples(files: RunFiles | None) -> list[Sample]:
    """The current values of one run."""
    if files is None:
        return [Sample("paceline_up", 0.0)]
    outcome, efficiency = Outcome.of(files), Efficiency.of(files)
    steps, evaluated = files.steps(), (files.of_kind("eval") or [{}])[-1]
    saved = (files.of_kind("checkpoint") or [{}])[-1]

    def recent(field: str) -> float | None:
        return middle(steps[field][-_RECENT:])

    found = [
        Sample("paceline_up", 1.0),
        Sample("paceline_step", float(outcome.steps)),
        Sample("paceline_total_steps", _number(outcome.total_steps)),
        Sample("paceline_epoch", outcome.epochs),
        Sample("paceline_ranks", _number(outcome.world_size)),
        Sample("paceline_finished", float(outcome.state == "finished")),
        Sample("paceline_loss", steps.last("loss")),
        Sample("paceline_learning_rate", steps.last("lr")),
        Sample("paceline_loss_scale", steps.last("loss_scale")),
        Sample("paceline_images_per_second", recent("images_per_s")),
        Sample("paceline_step_seconds", recent("step_s")),
        Sample("paceline_exposed_communication_seconds", recent("exposed_comm_s")),
        Sample("paceline_input_stall_seconds", recent("input_stall_s")),
        Sample("paceline_validation_top1_percent", finite(evaluated, "top1")),
        Sample("paceline_validation_top5_percent", finite(evaluated, "top5")),
        Sample("paceline_validation_loss", finite(evaluated, "loss")),
        Sample("paceline_skipped_steps_total", float(outcome.skipped_steps)),
        Sample("paceline_corrupt_samples_total", float(outcome.corrupt_samples)),
        Sample("paceline_resumes_total", float(outcome.resumes)),
        Sample("paceline_checkpoint_step", finite(saved, "step")),
        Sample("paceline_checkpoint_save_seconds", finite(saved, "save_s")),
        Sample("paceline_checkpoint_stall_seconds", finite(saved, "stall_s")),
        Sample("paceline_last_event_timestamp_seconds", files.ranks[0].last_time),
    ]
    if efficiency is not None:
        found.append(Sample("paceline_efficiency", efficiency.e))
        found += [
            Sample("paceline_lost_share", share, {"cause": cause})
            for cause, share in efficiency.lost.items()
        ]
    return found


def _number(value: int | None) -> float | None:
    return None if value is None else float(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
