"""Links, namespaces and the tools that they need: rates, owners, and refusals in one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from benchmarks.cluster import EmulatedCluster, network, why_unavailable
from benchmarks.cluster.network import bits_per_s, owner_is_gone
from cluster.traces import PATIENCE_S, RANK_ENV
from paceline.core.errors import LaunchError

KNOCK = "import socket, sys; socket.create_connection((sys.argv[1], 9), float(sys.argv[2]))"


@pytest.mark.parametrize(
    ("text", "bits"), [("200mbit", 2e8), ("1gbit", 1e9), ("1.5mbit", 1.5e6), ("64kbit", 64e3)]
)
def test_rates(text: str, bits: float) -> None:
    assert bits_per_s(text) == bits


@pytest.mark.usefixtures("_machine")
def test_both_directions_have_the_rate_which_may_change() -> None:
    """The kernel's own account: a measured speed depends on what else the machine does."""
    with EmulatedCluster(2, rate=[None, "40mbit"]) as cluster:
        host1, switch = cluster.namespaces[1:]

        def rates() -> list[list[str]]:
            found = []
            for namespace in (host1, switch):
                command = ["ip", "netns", "exec", namespace, "tc", "qdisc", "show"]
                shown = subprocess.run(command, check=True, capture_output=True, text=True)
                found.append(re.findall(r"qdisc tbf .* rate (\w+)", shown.stdout))
            return found

        assert rates() == [["40Mbit"], ["40Mbit"]]
        for sender, receiver in ((0, 1), (1, 0)):
            speed = cluster.measure_link(sender, receiver)
            assert min(speed.bits_per_s, speed.round_trip_s) > 0
        cluster.set_rate("80mbit", host=1)
        assert rates() == [["80Mbit"], ["80Mbit"]]
        cluster.set_rate(None)
        assert rates() == [[], []]


@pytest.mark.usefixtures("_machine")
def test_a_cut_link_loses_what_is_sent_until_it_is_mended() -> None:
    with EmulatedCluster(2) as cluster:

        def knock(timeout_s: int) -> str:
            command = [sys.executable, "-c", KNOCK, cluster.address(1), str(timeout_s)]
            return cluster.start(0, command).wait(PATIENCE_S).err[0]

        # Nobody listens at that port, and a host within reach says so.
        assert "ConnectionRefusedError" in knock(60)
        cluster.cut(1)
        lost = knock(1)
        assert "TimeoutError" in lost or "No route to host" in lost
        cluster.reconnect(1)
        assert "ConnectionRefusedError" in knock(60)


PRINT_A_TAG = "from benchmarks.cluster.network import new_tag; print(new_tag(), end='')"


def test_a_process_that_has_ended_is_gone() -> None:
    command = [sys.executable, "-c", PRINT_A_TAG]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=RANK_ENV) as process:
        tag = process.stdout.read()
        # As long as nobody has taken its exit code, it is there, but not alive.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert owner_is_gone(f"{tag}-switch")
    assert owner_is_gone(tag)


def test_names_of_others_are_left_alone() -> None:
    for name in ("blue", "paceline-host0", "paceline-x-1-2", "other-paceline-1-1-1"):
        assert not owner_is_gone(name)


def pretend_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(network, "find_tool", lambda name: f"/usr/sbin/{name}")


def test_not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_unavailable().startswith("not root")
    with pytest.raises(LaunchError, match="no emulated cluster: not root"):
        EmulatedCluster(1).__enter__()


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("netns add", "network namespaces are not permitted (ip netns add"),
        ("tbf", "tc's tbf is missing (tc -n"),
    ],
)
def test_what_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch, broken: str, words: str) -> None:
    pretend_root(monkeypatch)

    def call(name: str, *arguments: str) -> None:
        shown = " ".join([name, *arguments])
        if broken in shown:
            raise LaunchError(f"{shown}: Operation not permitted")

    monkeypatch.setattr(network, "call_tool", call)
    reason = why_unavailable()
    assert reason.startswith(words)
    assert reason.endswith("Operation not permitted)")
    assert "\n" not in reason


def test_a_tool_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "find_tool", lambda name: "/bin/false")
    with pytest.raises(LaunchError, match="^ip link: exit code 1$"):
        network.call_tool("ip", "link")
