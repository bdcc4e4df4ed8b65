"""The kernel that does run is in device_loader_cases.py."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.data.on_device import crop_check
from paceline.data.on_device.crop_check import check_crop_kernel

CPU = torch.device("cpu")


def check() -> None:
    check_crop_kernel("nvjpeg", CPU, size=4, hole=0, interleaved=False)


def test_without_triton_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs? Triton: the package .*set data.decoder = 'auto'"):
        check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, kernels can be built")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
def test_a_kernel_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="data.decoder = 'nvjpeg': .*no kernel can be built: "):
        check()


def test_a_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crop_check, "_stretched", lambda *_: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="a kernel gave a wrong result"):
        check()
