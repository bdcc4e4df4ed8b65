"""`paceline bench input`, as the command runs it, but in this process: importing torch takes longer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from data_sets import write_shards
from paceline.cli import app


class Bench:
    """Exit code and what was written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capfd = monkeypatch, capfd

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["paceline", "bench", "input", *arguments])
        code = app._run()
        written = self._capfd.readouterr()
        return code, written.out, written.err


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Bench:
    return Bench(monkeypatch, capfd)


def test_one_json_object_with_rows_ratios_training_and_environment(
    bench: Bench, tmp_path: Path
) -> None:
    data = write_shards(tmp_path / "data")
    code, out, err = bench(
        "--data-dir", str(data), "--image-size", "28", "-b", "4", "--rounds", "1", "--seconds",
        "0.05", "--workers", "1,2", "--peers", "dataloader,webdataset", "--peer-workers", "1",
        "--train-step", "resnet_tiny", "--steps", "1", "--warm-up", "1", "--device", "cpu", "--json",
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(out)
    names = [row["name"] for row in report["rows"]]
    assert names[:3] == ["ours × 1", "ours × 2", "dataloader × 1"]
    assert all(len(row["rounds"]) == 1 for row in report["rows"])
    assert report["rows"][0]["input"].startswith("1 thread")
    assert report["rows"][0]["remarks"] == []
    assert any(name.endswith("/ dataloader × 1") for name in report["ratios"])
    assert len(names) == 4 or "webdataset: not measured" in report["notes"][0]
    assert report["training"]["model"] == "resnet_tiny"
    assert report["training"]["share"] > 0
    assert report["versions"]["torch"]
    assert "round 1: ours × 1:" in err


def test_mistakes_are_one_line(bench: Bench, tmp_path: Path) -> None:
    data = str(write_shards(tmp_path / "data"))
    for arguments, words in (
        ((), "--data-dir: is needed"),
        (("--data-dir", data, "--split", "test"), "--split = 'test': unknown"),
        (("--data-dir", data, "--workers", "0"), "--workers = '0': must be whole numbers"),
        (("--data-dir", data, "--peers", "dali"), "--peers = 'dali': unknown"),
        (("--data-dir", data, "--decoder", "gif"), "data.decoder = 'gif': unknown"),
        (("--data-dir", data, "--device", "cpu", "--decoder", "nvjpeg"), "decodes on a GPU"),
        (("--data-dir", str(tmp_path / "none")), "no such directory"),
    ):
        code, _, err = bench("--peers", "", *arguments)
        assert code in (1, 2), (arguments, err)
        assert words in err, (arguments, err)
        assert err.count("\n") <= 1


def test_the_table_says_what_ran(bench: Bench, tmp_path: Path) -> None:
    data = write_shards(tmp_path / "data")
    code, out, err = bench(
        "--data-dir", str(data), "--image-size", "28", "-b", "4", "--rounds", "1", "--seconds",
        "0.01", "--workers", "1", "--peers", "", "--decoder", "pillow", "--device", "cpu",
    )  # fmt: skip
    assert code == 0, err
    assert "ours × 1: 1 thread (Pillow decodes)" in out


def test_memory_and_seek(bench: Bench) -> None:
    code, out, err = bench("--synthetic-index", "3000", "--image-size", "8", "-b", "50")
    assert code == 0, err
    said = " ".join(out.split())
    assert "3,000 samples: at most" in said
    assert "seek to its middle in" in said
