"""Links have the rate that they were given, and can be cut and mended."""

from __future__ import annotations

import sys

import pytest

from paceline.bench.cluster import EmulatedCluster
from paceline.bench.cluster.network import bits_per_s

KNOCK = "import socket, sys; socket.create_connection((sys.argv[1], 9), timeout=1)"
# A link may never be faster than its rate, but for its burst. How much slower it may seem is the busy
# machine's affair, not the link's; the shares below only tell rates apart.
ABOVE, BELOW = 1.1, 0.25


@pytest.mark.parametrize(
    ("text", "bits"), [("200mbit", 2e8), ("1gbit", 1e9), ("1.5mbit", 1.5e6), ("64kbit", 64e3)]
)
def test_rates(text: str, bits: float) -> None:
    assert bits_per_s(text) == bits


@pytest.mark.usefixtures("_machine")
def test_both_directions_have_the_rate_which_may_change() -> None:
    with EmulatedCluster(2, rate=[None, "40mbit"]) as cluster:
        for sender, receiver in ((0, 1), (1, 0)):
            speed = cluster.measure_link(sender, receiver)
            assert BELOW * 40e6 < speed.bits_per_s < ABOVE * 40e6
            assert speed.round_trip_s > 0
        cluster.set_rate("160mbit", host=1)
        assert ABOVE * 40e6 < cluster.measure_link(0, 1).bits_per_s < ABOVE * 160e6
        cluster.set_rate(None)
        assert cluster.measure_link(0, 1).bits_per_s > ABOVE * 160e6


@pytest.mark.usefixtures("_machine")
def test_a_cut_link_loses_what_is_sent_until_it_is_mended() -> None:
    with EmulatedCluster(2) as cluster:
        knock = [sys.executable, "-c", KNOCK, cluster.address(1)]
        # Nobody listens at that port, and a host within reach says so.
        assert "ConnectionRefusedError" in cluster.start(0, knock).wait(20).err[0]
        cluster.cut(1)
        lost = cluster.start(0, knock).wait(20).err[0]
        assert "TimeoutError" in lost or "No route to host" in lost
        cluster.reconnect(1)
        assert "ConnectionRefusedError" in cluster.start(0, knock).wait(20).err[0]
