"""Rehearsals: one process trains as the ranks of a cluster would, with predicted times."""

from __future__ import annotations

PROVIDES: dict[str, dict[str, str]] = {
    "settings of run": {"rehearsal": "rehearsal.settings:RehearsalSettings"},
    "strategy": {"rehearsal": "rehearsal.strategy:Rehearsal"},
}
