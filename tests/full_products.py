"""Products of fp32 numbers in full precision on a GPU, for tests that compare with other arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_products() -> Iterator[None]:
    """Without TF32, and with algorithms that repeat. pytest's monkeypatch cannot put these back."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = False, False, True
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = before
