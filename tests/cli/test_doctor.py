from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_runs import is_launchers
from paceline.cli.doctor import check_data, check_decoder, check_devices, check_disk, doctor
from paceline.cli.doctor import check_rendezvous as check
from paceline.data.decode.library import VARIABLE


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [*filter(is_launchers, os.environ), "MASTER_ADDR", "MASTER_PORT"]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket at the port of a job of two ranks."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(bound.getsockname()[1]))
        yield bound


def test_this_machine_is_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor(data_dir="", output=tmp_path)
    shown = capsys.readouterr().out
    assert code == 0, shown
    for word in ("torch", "gloo", "cpu", "region decoder", "rendezvous", "12000 images", "disk"):
        assert word in shown
    assert doctor(data_dir=str(tmp_path / "nowhere"), output=tmp_path) == 1


def test_rank_0_needs_a_free_port(monkeypatch: pytest.MonkeyPatch, host: socket.socket) -> None:
    monkeypatch.setenv("RANK", "0")
    host.listen()
    found = list(check())[-1]
    assert not found.ok
    assert "MASTER_PORT" in found.remedy
    # torchrun's agent listens there, and that is fine.
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert list(check())[-1].ok
    host.close()
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert list(check())[-1].ok


def test_other_ranks_need_an_answer(monkeypatch: pytest.MonkeyPatch, host: socket.socket) -> None:
    monkeypatch.setenv("RANK", "1")
    assert not list(check())[-1].ok
    host.listen()
    assert list(check())[-1].ok


def test_one_process_needs_no_port_and_half_an_environment_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [finding.ok for finding in check()] == [True]
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert [finding.ok for finding in check()] == [False]


def test_missing_data_and_a_full_disk_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = list(check_data(str(tmp_path / "nowhere")))
    assert [(finding.ok, bool(finding.remedy)) for finding in findings] == [(False, True)] * 2

    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    assert [finding.ok for finding in check_disk(tmp_path / "not" / "yet")] == [False]


def test_every_device_is_ok_or_has_a_remedy() -> None:
    assert all(finding.ok or finding.remedy for finding in check_devices())


def test_a_missing_decoder_is_no_problem_but_has_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.so"))
    (found,) = check_decoder()
    assert found.ok
    assert VARIABLE in found.remedy
