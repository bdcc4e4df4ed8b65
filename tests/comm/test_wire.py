from __future__ import annotations

import pytest
import torch

from paceline.comm.planned_transport import WIRES, WireFormat
from paceline.core.errors import ConfigError


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("scaled", [False, True])
def test_there_and_back(name: str, scaled: bool) -> None:
    wire = WireFormat.named(name, 48, scaled=scaled)
    buffer = torch.tensor([0.0, 1.0, -2.5, 1024.0, 0.125])
    sent = torch.empty(5, dtype=wire.dtype)
    wire.encode(buffer, sent)
    back = torch.empty(5)
    wire.decode(sent, back)
    assert torch.equal(back, buffer)
    assert wire.shift == (6 if scaled else 0)
    assert sent[1] == (1 / 64 if scaled else 1)


def test_short_names() -> None:
    assert [WireFormat.named(n).name for n in ("fp32", "fp16", "bf16")] == list(WIRES)
    with pytest.raises(ConfigError, match="comm.wire = 'float61'.*did you mean 'float16'"):
        WireFormat.named("float61")


@pytest.mark.parametrize(("ranks", "shift"), [(1, 0), (2, 1), (3, 2), (2048, 11), (2049, 12)])
def test_fp16_alone_is_scaled_unless_told(ranks: int, shift: int) -> None:
    assert WireFormat.named("float16", ranks).shift == shift
    assert WireFormat.named("bfloat16", ranks).shift == 0
    assert WireFormat.named("float32", ranks).shift == 0


def test_what_fp16_cannot_hold_stays_visible() -> None:
    """Infinite, not clipped: the finite check skips the step on all ranks."""
    wire = WireFormat.named("float16", 2)
    sent = torch.empty(2, dtype=torch.float16)
    wire.encode(torch.tensor([1e6, float("nan")]), sent)
    assert torch.isinf(sent[0])
    assert torch.isnan(sent[1])


@pytest.mark.parametrize("count", [1, 3, 4, 6])
def test_the_mean_in_place(count: int) -> None:
    for name in WIRES:
        wire = WireFormat.named(name, count)
        buffer = torch.tensor([6.0, 12.0, -0.75]).to(wire.dtype)
        expected = buffer.float() * count / count
        total = buffer * 1
        wire.encode(total, total)
        total *= count  # the sum of equal shares
        wire.decode(total, total, divide_by=count)
        assert torch.allclose(total.float(), expected, rtol=2 * wire.unit_roundoff, atol=0)
