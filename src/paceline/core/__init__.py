"""What every package shares: errors, topology, layouts. Imports the standard library only."""

from paceline.core.errors import (
    CheckpointError,
    CommError,
    ConfigError,
    DataError,
    LaunchError,
    PacelineError,
    RunError,
)
from paceline.core.flat_layout import FlatLayout, Slot, TensorSpec
from paceline.core.topology import Topology

__all__ = [
    "CheckpointError",
    "CommError",
    "ConfigError",
    "DataError",
    "FlatLayout",
    "LaunchError",
    "PacelineError",
    "RunError",
    "Slot",
    "TensorSpec",
    "Topology",
]
