"""Parts for an own training loop: `init`, `DataParallel`, `prepare`, `accelerate` and `Checkpointer`.

Each works without the others. Public names load on first use; importing them does not start CUDA.
"""

from __future__ import annotations

from paceline.core import lazy_exports

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Accelerated": "accelerated",
        "Checkpointer": "checkpointer",
        "Context": "context",
        "DataParallel": "data_parallel",
        "Prepared": "prepared",
        "accelerate": "accelerated",
        "init": "context",
        "prepare": "prepared",
    },
)
