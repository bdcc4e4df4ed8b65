from __future__ import annotations

import socket

import pytest

from paceline.comm.rendezvous import explain, meet
from paceline.core.errors import CommError
from paceline.core.topology import Topology

RANK0 = Topology(rank=0, world_size=2, local_world_size=2, launcher="environment")


def test_a_port_in_use_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(CommError) as caught:
            meet(RANK0, timeout_s=5)
    assert f"127.0.0.1:{port} is in use" in str(caught.value)
    assert "MASTER_PORT" in caught.value.remedy


def test_a_rank_0_that_never_comes_is_not_waited_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    late = Topology(rank=1, world_size=2, local_rank=1, local_world_size=2, launcher="environment")
    with pytest.raises(CommError, match="rank 1 did not meet the others at 127.0.0.1:1 within 1 s"):
        meet(late, timeout_s=1)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("Permission denied"), "may not listen"),
        (RuntimeError("getaddrinfo failed: Name or service not known"), "cannot be resolved"),
        (ValueError("port must have value"), "is not an address"),
    ],
)
def test_other_causes_have_their_own_words(error: Exception, words: str) -> None:
    cause, remedy = explain("host:80", RANK0, error, 5)
    assert words in cause
    assert remedy
