"""Connections of the rendezvous store ask no name server."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

import paceline.comm.store as host_names
from paceline.comm.store import names_from_files


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the C library is told, in order."""
    told: list[str] = []
    monkeypatch.setattr(host_names, "_look_up_in", told.append)
    return told


def test_the_configured_sources_come_back_with_the_last_user(
    sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "nsswitch.conf"
    config.write_text("passwd: files\nhosts:  files mdns4 [NOTFOUND=return] dns # as it is\n")
    monkeypatch.setattr(host_names, "_CONFIG", config)
    with names_from_files():
        with names_from_files():
            assert sources == ["files"]
        assert sources == ["files"]
    assert sources == ["files", "files mdns4 [NOTFOUND=return] dns"]


def test_an_unknown_address_is_not_asked_for() -> None:
    """A name server that does not answer takes five seconds and more."""

    def looks_up_at_once() -> bool:
        done = threading.Event()

        def look_up() -> None:
            with names_from_files():
                assert socket.getnameinfo(("203.0.113.77", 80), 0)[0] == "203.0.113.77"
                assert socket.gethostbyname("localhost") == "127.0.0.1"
            done.set()

        threading.Thread(target=look_up, daemon=True).start()
        return done.wait(3)

    # A busy host may be slow once; a name server that is asked is slow each time.
    assert any(looks_up_at_once() for _ in range(5))
