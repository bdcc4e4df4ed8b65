"""Methods of the literature that are not the default, one module or sub-package each.

`PROVIDES` has what they provide: by kind the name that a setting gives, and its place. Nothing else is
imported here, so that each module can be removed.
"""

from __future__ import annotations

PROVIDES: dict[str, dict[str, str]] = {
    "strategies": {
        "asynchronous": "alternatives.asynchronous.strategy:Asynchronous",
        "synced_norms": "alternatives.synced_norms.strategy:SyncedNorms",
        "unequal": "alternatives.unequal.strategy:Unequal",
    },
    "run settings": {
        "asynchronous": "alternatives.asynchronous.settings:AsynchronousSettings",
        "synced_norms": "alternatives.synced_norms.settings:SyncedNormsSettings",
        "unequal": "alternatives.unequal.settings:UnequalSettings",
    },
}
