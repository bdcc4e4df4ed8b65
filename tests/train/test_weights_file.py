from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from paceline.train.weights import fingerprint, write_weights


def test_one_flipped_bit_changes_the_fingerprint() -> None:
    net = nn.Linear(3, 2)
    before = fingerprint(net)
    assert fingerprint(net) == before
    with torch.no_grad():
        net.weight.view(torch.int32)[0, 0] ^= 1
    assert fingerprint(net) != before


def test_the_memory_format_does_not_matter() -> None:
    net = nn.Conv2d(3, 4, 3)
    assert fingerprint(net) == fingerprint(net.to(memory_format=torch.channels_last))


def test_safetensors_hold_the_values_in_nchw_order(tmp_path: Path) -> None:
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    write_weights(net.state_dict(), tmp_path / "w.safetensors", {"model": "conv"})
    with safe_open(tmp_path / "w.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
        assert file.metadata()["model"] == "conv"
        assert torch.equal(file.get_tensor("weight"), net.weight)
