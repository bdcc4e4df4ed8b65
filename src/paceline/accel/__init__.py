"""Faster layers for training: fused norms and convolutions, recomputed norms, torch.compile."""

from __future__ import annotations

PROVIDES: dict[str, dict[str, str]] = {
    "accelerations": {"accel": "accel.acceleration:ACCELERATION"},
    "run settings": {"accel": "accel.settings:AccelSettings"},
}
