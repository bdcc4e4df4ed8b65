"""Connections to the GPU are asked for in time, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from paceline.core import host
from paceline.core.host import ask_for_connections, connections, few_connections

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """And as it was, afterwards."""
    monkeypatch.setenv(NAME, "something")
    monkeypatch.delenv(NAME)


def drive(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """A driver that answers so."""
    driver = SimpleNamespace(cuDeviceGetCount=lambda count: status)
    monkeypatch.setattr(host.ctypes, "CDLL", lambda name: driver)


def test_asked_for_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    drive(monkeypatch, 3)
    ask_for_connections()
    assert os.environ[NAME] == "32"
    assert few_connections() == ""


def test_not_asked_for_when_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    drive(monkeypatch, 0)
    ask_for_connections()
    assert NAME not in os.environ
    assert few_connections().endswith(f"set {NAME}=32, it is 8")


@pytest.mark.parametrize("error", [OSError, AttributeError])
def test_without_a_driver_there_is_nothing_to_be_late_for(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> None:
        raise error

    monkeypatch.setattr(host.ctypes, "CDLL", load)
    ask_for_connections()
    assert connections() == "32"


def test_what_a_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "1")
    ask_for_connections()
    assert os.environ[NAME] == "1"
    assert few_connections().endswith("it is 1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("before", ["pass", "torch.cuda.is_available()"])
def test_a_question_starts_cuda(before: str) -> None:
    script = (
        "import os, torch; from paceline.core.host import ask_for_connections as ask; "
        f"{before}; ask(); print(os.environ.get('{NAME}'))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["32" if before == "pass" else "None"]
