"""Methods of the literature that are not the default, one module or sub-package each.

`PROVIDES` has what they provide: by kind the name that a setting gives, and its place. Nothing else is
imported here, so that each module can be removed.
"""

from __future__ import annotations

PROVIDES: dict[str, dict[str, str]] = {}
