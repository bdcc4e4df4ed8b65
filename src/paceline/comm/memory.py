"""`Memory`: what an exchange remembers from step to step.

Most exchanges remember nothing. Those that compress gradients keep the rounding errors for the next
step. This state differs between ranks. It is part of the checkpoint, and a skipped step does not change
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class Memory:
    """The base class, whose methods do nothing.

    Attributes:
        kind: Names the state in checkpoints and notes, in the plural.
        scale: The loss scale of the step on the device. Gradients arrive multiplied by it.
    """

    kind = "memories"

    def __init__(self) -> None:
        self.scale: Tensor | None = None

    def commit(self, discard: Tensor) -> None:
        """After the update; `discard`, a flag on the device, says whether the step leaves no trace."""

    @property
    def state_bytes(self) -> int:
        """Returns the bytes of device memory on this rank."""
        return 0

    def state(self) -> dict[str, Any]:
        """Returns this rank's state for a checkpoint: tensors, numbers and texts."""
        return {}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Loads what `state` returned on this rank, with the same number of ranks and the same plan."""
