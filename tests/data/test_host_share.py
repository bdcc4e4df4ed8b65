from __future__ import annotations

from typing import Any

import pytest

from paceline.data.on_device import host_share
from paceline.data.on_device.host_share import HostShare


def test_causes_are_counted_apart_and_the_first_failure_is_told_at_once(
    memory_source: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = memory_source(9)
    share = HostShare(source, "nvJPEG")
    assert share.remark() == ""
    share.add(1, "unfit")
    assert share.remark() == "1 samples were decoded on the host: 1 no JPEGs for the GPU"
    assert capsys.readouterr().err == ""
    for index in (4, 5):
        share.add(index, "refused")
        share.failed("status 4", index)
    told = "nvJPEG failed with memory:4 (status 4); the host decodes it"
    assert capsys.readouterr().err == f"paceline: warning: {told}\n"
    assert [share.takes(index) for index in (0, 1, 4)] == [False, True, True]
    assert share.remark() == (
        "5 samples were decoded on the host: 2 no JPEGs for the GPU, "
        "3 after the GPU's decoder failed (the first: memory:4: status 4)"
    )


def test_what_is_known_of_a_source_serves_the_next_loader(
    memory_source: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = memory_source(9)
    first = HostShare(source, "nvJPEG")
    first.add(3, "refused")
    first.failed("odd", 3)
    capsys.readouterr()
    again = HostShare(source, "nvJPEG")
    assert again.takes(3)
    again.failed("odd", 4)
    assert capsys.readouterr().err == ""  # told already
    assert "(the first: memory:3: odd)" in again.remark()
    assert not HostShare(memory_source(9), "nvJPEG").takes(3)


def test_a_chunk_that_fails_though_its_files_are_good_is_told(
    memory_source: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    share = HostShare(memory_source(9), "nvJPEG")
    share.failed("status 6", None)
    assert "failed with a chunk (status 6); its files are decoded" in capsys.readouterr().err
    assert "a chunk: status 6" in share.remark()


def test_memory_is_bounded(memory_source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_share, "_MOST_REMEMBERED", 2)
    share = HostShare(memory_source(9), "nvJPEG")
    for index in range(5):
        share.add(index, "unfit")
    assert [share.takes(index) for index in range(3)] == [True, True, False]
    assert share.remark().startswith("7 samples")
