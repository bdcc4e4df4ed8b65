"""Paceline: synchronous data-parallel training of convolutional networks at very large batches.

Rooms, lowest first: `core`, then `plan`, `data`, `models`, `precision`, `optim`, then `comm` and
`report`, then `config`, `train`, `cli`. A room imports only rooms below it.
"""

from paceline.version import __version__

__all__ = ["__version__"]
