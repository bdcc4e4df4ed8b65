"""The protocol of elastic membership, in all interleavings; flawed protocols are rejected."""

from __future__ import annotations

import pytest

from elastic.model import FLAWS, POINTS, Broken, Protocol, explore

# The smallest job that shows a flaw: ranks, steps, losses.
SHOWN_BY = dict.fromkeys(FLAWS, (3, 2, 1)) | {
    "no generation in messages": (2, 2, 1),
    "reused buffers": (2, 2, 1),
    "published when applied": (2, 2, 1),
    "lost while alive": (2, 2, 1),
    "ends without a word": (2, 2, 1),
    "ends after the last update": (2, 2, 1),
    "keeps nothing received": (4, 1, 2),
}


@pytest.mark.parametrize(
    "protocol",
    [
        Protocol(2, losses=1),
        Protocol(3, losses=2),
        Protocol(3, losses=2, min_ranks=2),
        Protocol(3, losses=2, first_lives=True),
        Protocol(4, steps=1, losses=1),
    ],
    ids=str,
)
def test_the_protocol_holds(protocol: Protocol) -> None:
    found = explore(protocol)
    assert found.states > 100
    if protocol.losses > 1:
        assert found.lost_at == set(POINTS)


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flawed_protocol_is_rejected(flaw: str) -> None:
    ranks, steps, losses = SHOWN_BY[flaw]
    with pytest.raises(Broken) as caught:
        explore(Protocol(ranks, steps, losses, flaw=flaw))
    assert caught.value.path, "the moves that led there"


@pytest.mark.slow
@pytest.mark.parametrize(
    "protocol",
    [
        Protocol(4, losses=3),
        Protocol(4, losses=3, first_lives=True),
        Protocol(4, losses=3, min_ranks=3),
        Protocol(3, steps=3, losses=2),
    ],
    ids=str,
)
def test_the_protocol_holds_for_four_members(protocol: Protocol) -> None:
    assert explore(protocol).lost_at == set(POINTS)
