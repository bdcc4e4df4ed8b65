"""Where a cluster cannot be, the reason is one line."""

from __future__ import annotations

import os
from typing import Any

import pytest

from paceline.bench.cluster import EmulatedCluster, network, why_unavailable
from paceline.core.errors import LaunchError


def pretend_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(network, "find_tool", lambda name: f"/usr/sbin/{name}")


def test_not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_unavailable().startswith("not root")
    with pytest.raises(LaunchError, match="no emulated cluster: not root"):
        EmulatedCluster(1).__enter__()


def test_no_iproute2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(network, "find_tool", lambda name: None)
    assert why_unavailable() == "no ip and no tc here: install iproute2"


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("netns add", "network namespaces are not permitted (ip netns add"),
        ("netns exec", "programs cannot be started in a namespace (ip netns exec"),
        ("type veth", "bridges or veth pairs are not permitted (ip -n"),
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


def test_a_tool_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere: Any = "/nowhere/ip"
    monkeypatch.setattr(network, "find_tool", lambda name: nowhere)
    with pytest.raises(LaunchError, match="install iproute2"):
        network.call_tool("ip", "link")
