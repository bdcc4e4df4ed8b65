"""The extension packages of this distribution, each with a table `PROVIDES` in its `__init__`.

`paceline.core.extensions` reads `PACKAGES` and skips packages that are not installed.
"""

from __future__ import annotations

PACKAGES = ("accel", "alternatives", "recipes", "rehearsal")
