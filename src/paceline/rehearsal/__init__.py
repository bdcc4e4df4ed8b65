"""Rehearsals: one process trains in place of a cluster's ranks, and predicts the times there."""

from __future__ import annotations

PROVIDES: dict[str, dict[str, str]] = {
    "run settings": {"rehearsal": "rehearsal.settings:RehearsalSettings"},
    "strategies": {"rehearsal": "rehearsal.strategy:Rehearsal"},
}
