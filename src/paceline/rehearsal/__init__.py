"""Rehearsals: one process trains as the ranks of a cluster would, with predicted times."""

from __future__ import annotations

PROVIDES: dict[str, dict[str, str]] = {
    "run settings": {"rehearsal": "rehearsal.settings:RehearsalSettings"},
    "strategies": {"rehearsal": "rehearsal.strategy:Rehearsal"},
}
