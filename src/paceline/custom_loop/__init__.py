"""Parts for custom training loops: `init`, `DataParallel`, `prepare`, `accelerate` and `Checkpointer`.

Each part also works without the others. Importing any of these names does not start CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core import lazy_exports

if TYPE_CHECKING:
    from paceline.custom_loop.accelerated import Accelerated, accelerate
    from paceline.custom_loop.checkpointer import Checkpointer
    from paceline.custom_loop.context import Context, init
    from paceline.custom_loop.data_parallel import DataParallel
    from paceline.custom_loop.prepared import Prepared, prepare

__all__ = [
    "Accelerated", "Checkpointer", "Context", "DataParallel", "Prepared", "accelerate", "init", "prepare",
]  # fmt: skip
if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_exports(__name__)
