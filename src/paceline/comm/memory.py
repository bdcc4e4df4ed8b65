"""`Memory`: the state that a gradient exchange keeps between steps.

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
        """Keeps the changes of the completed step, unless the device flag `discard` is set."""

    @property
    def state_bytes(self) -> int:
        """Returns the bytes of device memory on this rank."""
        return 0

    def state(self) -> dict[str, Any]:
        """Returns this rank's state for a checkpoint: tensors, numbers and texts."""
        return {}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Loads the result of `state` from this rank. Ranks and plan must be unchanged."""
