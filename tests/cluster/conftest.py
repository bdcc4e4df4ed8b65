"""Checks once if this machine can have a cluster, and restores the signals of a terminal."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from benchmarks.cluster import why_unavailable
from cluster.traces import hear_signals_as_usual


@pytest.fixture(scope="session")
def _reason() -> str:
    return why_unavailable()


@pytest.fixture
def _machine(_reason: str) -> None:
    """Skips the test, with the reason, if namespaces cannot be made."""
    if _reason:
        pytest.skip(f"no emulated cluster here: {_reason}")


@pytest.fixture
def _usual_signals() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    hear_signals_as_usual()
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
