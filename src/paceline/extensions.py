"""The extension packages of this distribution, each with a table `PROVIDES` in its `__init__`.

The core reads this list by name (`paceline.core.extensions`). A package that was deleted is skipped.
"""

from __future__ import annotations

PACKAGES = ("accel", "alternatives", "rehearsal")
