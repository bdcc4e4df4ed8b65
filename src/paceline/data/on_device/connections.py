"""How many streams of a process a GPU serves without queueing one behind another.

In: the environment, before CUDA starts. Out: as many connections as CUDA has. By default there are 8, and
nvJPEG's streams alone are more: the training then waits in line behind images that are being decoded.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_MOST = "32"


def widen_connections(environment: MutableMapping[str, str] = os.environ) -> None:
    """Leaves alone what a user has set."""
    environment.setdefault(VARIABLE, _MOST)
