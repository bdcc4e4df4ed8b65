"""MPS for ranks that share a GPU; what needs a GPU is in tests/nccl."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks import one_gpu


def test_mps_restarts_once_for_each_attempt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    restarts: list[None] = []
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "pipes"))
    monkeypatch.setattr(one_gpu, "start_mps", lambda: None)
    monkeypatch.setattr(one_gpu, "restart_mps", lambda: restarts.append(None))
    for number, attempt in enumerate(("job 1", "job 2", "other 2"), start=1):
        with ThreadPoolExecutor(4) as ranks:
            list(ranks.map(one_gpu.restart_mps_once, [attempt] * 4))
        assert len(restarts) == number
