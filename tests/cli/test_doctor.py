from __future__ import annotations

import socket
from pathlib import Path

import pytest

from paceline.cli.doctor import (
    check_data,
    check_decoder,
    check_devices,
    check_disk,
    check_rendezvous,
    doctor,
)
from paceline.data.decode.library import VARIABLE

LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH:
        monkeypatch.delenv(name, raising=False)


def test_this_machine_is_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_PORT", str(port))
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "1")
        code = doctor(data_dir="", output=tmp_path)
    shown = capsys.readouterr().out
    assert code == 0, shown
    for word in ("torch", "gloo", "cpu", "region decoder", "rendezvous", "12000 images", "disk"):
        assert word in shown


def test_a_port_in_use_is_a_problem_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        found = list(check_rendezvous())[-1]
    assert (found.ok, found.remedy) == (False, "set MASTER_PORT to a free port")


def test_a_rank_that_connects_needs_somebody_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as host:
        host.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(host.getsockname()[1]))
        assert not list(check_rendezvous())[-1].ok
        host.listen()
        assert list(check_rendezvous())[-1].ok


def test_under_torchrun_the_agent_holds_the_port_and_that_is_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with socket.socket() as agent:
        agent.bind(("127.0.0.1", 0))
        agent.listen()
        monkeypatch.setenv("MASTER_PORT", str(agent.getsockname()[1]))
        assert list(check_rendezvous())[-1].ok


def test_one_process_needs_no_port() -> None:
    (found,) = check_rendezvous()
    assert found.ok


def test_a_half_set_environment_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    (found,) = check_rendezvous()
    assert not found.ok
    assert "RANK is not set" in found.found


def test_missing_data_is_a_problem(tmp_path: Path) -> None:
    findings = list(check_data(str(tmp_path / "nowhere")))
    assert [finding.ok for finding in findings] == [False, False]
    assert all(finding.remedy for finding in findings)


def test_a_full_disk_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    (found,) = check_disk(tmp_path / "not" / "yet")
    assert not found.ok


def test_every_device_row_says_ok_or_what_to_do() -> None:
    for finding in check_devices():
        assert finding.ok or finding.remedy


def test_a_missing_decoder_is_no_problem_but_has_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.so"))
    (found,) = check_decoder()
    assert found.ok
    assert "Pillow decodes: the library does not load" in found.found
    assert VARIABLE in found.remedy


def test_a_problem_makes_the_exit_code_1(tmp_path: Path) -> None:
    assert doctor(data_dir=str(tmp_path / "nowhere"), output=tmp_path) == 1
