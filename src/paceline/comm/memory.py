"""`Memory`: the state that a gradient exchange (all-reduce of the buckets) keeps between steps.

Most exchanges keep no state. An exchange that compresses gradients keeps the residuals of the rounding
and adds them to the gradients of the next step (error feedback). This state differs between ranks and
is part of the checkpoint. A skipped step does not change the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class Memory:
    """State of a gradient exchange between steps. The methods of this base class do nothing.

    Attributes:
        kind: The name of the state in checkpoints and messages, in the plural.
        scale: The loss scale of the current step, by which the gradients have been multiplied. A
            tensor on the device, or None.
    """

    kind = "memories"

    def __init__(self) -> None:
        self.scale: Tensor | None = None

    def commit(self, discard: Tensor) -> None:
        """Keeps the state of the completed step, unless the tensor `discard` on the device is true."""

    @property
    def state_bytes(self) -> int:
        """Returns the bytes of device memory that the state takes on this rank."""
        return 0

    def state(self) -> dict[str, Any]:
        """Returns this rank's state for a checkpoint: tensors, numbers and texts."""
        return {}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Restores a state that `state` has returned on this rank, with the same ranks and plan."""
