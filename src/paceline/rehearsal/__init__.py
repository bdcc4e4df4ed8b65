"""Rehearsals: one process trains as the ranks of a cluster would, with predicted times."""

from __future__ import annotations

_FORMER_SETTINGS = (
    "nodes", "gpus_per_node", "gpu", "profile", "cluster", "node_gbps", "input_images_per_s", "eval_s",
    "startup_s", "price_per_gpu_hour",
)  # fmt: skip
_REMOVED = ("latency_us", "links", "oversubscription", "watts_per_gpu")
PROVIDES: dict[str, dict[str, str]] = {
    "run settings": {"rehearsal": "rehearsal.settings:RehearsalSettings"},
    "renamed settings": dict.fromkeys(
        [
            *(f"rehearse.{name}" for name in (*_FORMER_SETTINGS, *_REMOVED)),
            *(f"run.rehearsal.{name}" for name in _REMOVED),
        ],
        "rehearsal.settings:RENAMED",
    ),
    "strategies": {"rehearsal": "rehearsal.strategy:Rehearsal"},
}
