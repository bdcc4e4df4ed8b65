"""Rehearsals: one process computes the training of a whole cluster, and predicts the time there."""

from __future__ import annotations

PROVIDES: dict[str, dict[str, str]] = {
    "run settings": {"rehearsal": "rehearsal.settings:RehearsalSettings"},
    "strategies": {"rehearsal": "rehearsal.strategy:Rehearsal"},
}
