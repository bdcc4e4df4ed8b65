"""`Memory`: what an exchange remembers from step to step.

Most exchanges remember nothing. Those that compress gradients keep the rounding errors for the next step.
This state differs between ranks. It is part of the checkpoint, and a skipped step does not change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class Memory:
    """The base: each method does nothing.

    `kind` names the state in a checkpoint and in notes, in the plural. `scale` is the loss scale of the
    step on the device, in whose unit gradients arrive.
    """

    kind = "memories"

    def __init__(self) -> None:
        self.scale: Tensor | None = None

    def settle(self, discard: Tensor) -> None:
        """After the update; `discard`, a flag on the device, says whether the step leaves no trace."""

    @property
    def state_bytes(self) -> int:
        """Of the device's memory, on this rank."""
        return 0

    def state(self) -> dict[str, Any]:
        """This rank's, for a checkpoint: tensors, numbers and texts."""
        return {}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """What `state` gave on this rank of as many, with the same plan."""
