"""Parts for custom training loops: `init`, `DataParallel`, `prepare`, `accelerate` and `Checkpointer`.

Each part also works without the others. `paceline` exports all of them.
"""
