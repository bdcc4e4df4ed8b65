"""Paceline: synchronous data-parallel training of convolutional networks at very large batches.

Packages, lowest first: `core`, then `plan`, `data`, `models`, `precision`, `optim`, then `comm` and
`report`, then `config`, `train`, `bench`, `cli`. A package imports only packages below it.
"""

from paceline.version import __version__

__all__ = ["__version__"]
