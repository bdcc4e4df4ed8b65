"""The store of `paceline train --nproc-per-node` is out of the network's reach."""

from __future__ import annotations

import socket

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from paceline.cli.launch import ADDRESS, LocalRendezvous, register


def test_it_listens_on_loopback_alone() -> None:
    handler = LocalRendezvous(0, "job")
    # All of 127.0.0.0/8 is this host's: a store that listens on every address would answer here.
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.2", handler.port)) != 0
    client = TCPStore(ADDRESS, handler.port, is_master=False, wait_for_workers=False)
    client.set("job/word", "heard")
    assert handler.next_rendezvous().store.get("word") == b"heard"


def test_every_restart_meets_at_the_same_store() -> None:
    handler = LocalRendezvous(0, "job")
    first, second = handler.next_rendezvous(), handler.next_rendezvous()
    first.store.set("word", "heard")
    assert second.store.get("word") == b"heard"
    assert (second.rank, second.world_size) == (0, 1)
    assert second.bootstrap_store_info is not None
    assert second.bootstrap_store_info.master_addr == ADDRESS
    assert second.bootstrap_store_info.master_port == handler.port


def test_the_agent_finds_it_by_name_also_twice_in_a_process() -> None:
    for _ in range(2):
        parameters = RendezvousParameters(register(), f"{ADDRESS}:0", "job", 1, 1)
        handler = get_rendezvous_handler(parameters)
        assert isinstance(handler, LocalRendezvous)
        assert handler.get_run_id() == "job"


def test_a_port_in_use_is_an_error_of_the_system() -> None:
    handler = LocalRendezvous(0, "job")
    with pytest.raises(OSError, match="in use"):
        LocalRendezvous(handler.port, "other")
