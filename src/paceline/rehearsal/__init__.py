"""Rehearsals: one process trains as the ranks of a cluster would, with predicted times."""

from __future__ import annotations

_FORMER_SETTINGS = (
    "nodes", "gpus_per_node", "gpu", "profile", "cluster", "node_gbps", "latency_us", "links",
    "oversubscription", "input_images_per_s", "eval_s", "startup_s", "price_per_gpu_hour",
    "watts_per_gpu",
)  # fmt: skip
PROVIDES: dict[str, dict[str, str]] = {
    "run settings": {"rehearsal": "rehearsal.settings:RehearsalSettings"},
    "renamed settings": dict.fromkeys(
        (f"rehearse.{name}" for name in _FORMER_SETTINGS), "rehearsal.settings:RENAMED"
    ),
    "strategies": {"rehearsal": "rehearsal.strategy:Rehearsal"},
}
