"""Trains as a cluster would: the predicted times of the cluster that a run stands for."""

from __future__ import annotations

PROVIDES: dict[str, dict[str, str]] = {"strategies": {"rehearsal": "rehearsal.strategy:Rehearsal"}}
