"""The report is written whole or not at all."""

from pathlib import Path

import pytest

from paceline.core import whole_file
from paceline.core.errors import DataError
from paceline.report.run_files import RunFiles
from paceline.report.run_page import render, write_page, write_report


def fails(run_dir: Path, out: Path | None = None) -> str:
    with pytest.raises(DataError) as info:
        write_report(run_dir, out)
    assert len(str(info.value).splitlines()) == 1
    return str(info.value)


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_beside_the_records(finished_run: Path) -> None:
    path = write_report(finished_run)
    assert path == finished_run / "report.html"
    assert path.read_text("utf-8") == render(RunFiles.read(finished_run))
    assert names(finished_run) == ["config.toml", "metrics.jsonl", "report.html", "summary.json"]


def test_written_anew(finished_run: Path) -> None:
    (finished_run / "report.html").write_text("old", "utf-8")
    assert write_report(finished_run).read_text("utf-8").startswith("<!doctype html>")


def test_to_another_place(finished_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder" / "page.html"
    assert write_report(finished_run, out) == out
    assert out.is_file()
    assert write_report(finished_run, tmp_path) == tmp_path / "report.html"


@pytest.mark.parametrize(
    "name", ["summary.json", "config.toml", "metrics.jsonl", "weights.safetensors", "notes.txt"]
)
def test_files_that_are_no_pages_are_not_replaced(finished_run: Path, name: str) -> None:
    """Also those that the run has yet to write; an empty file and an older page are."""
    (finished_run / "notes.txt").write_text("mine", "utf-8")
    before = {file.name: file.read_bytes() for file in finished_run.iterdir()}
    assert "give a name that ends in .html" in fails(finished_run, finished_run / name)
    assert {file.name: file.read_bytes() for file in finished_run.iterdir()} == before


def test_an_empty_file_and_an_older_page_are_replaced(finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "page").touch()
    for _ in range(2):
        assert write_report(finished_run, tmp_path / "page").read_bytes().startswith(b"<!doctype")


def test_others_may_read_it(finished_run: Path) -> None:
    (finished_run / "plain").touch()
    mode = write_report(finished_run).stat().st_mode
    assert mode == (finished_run / "plain").stat().st_mode


def test_a_full_disk_leaves_the_old_report(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finished_run / "report.html").write_text("old", "utf-8")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_file.os, "fsync", full)
    assert "report.html cannot be written: No space left on device" in fails(finished_run)
    assert (finished_run / "report.html").read_text("utf-8") == "old"
    assert names(finished_run) == ["config.toml", "metrics.jsonl", "report.html", "summary.json"]


def test_a_place_that_cannot_be(finished_run: Path) -> None:
    assert "cannot be written" in fails(finished_run, finished_run / "config.toml" / "page.html")


def test_no_run_no_report(tmp_path: Path) -> None:
    assert "is not a run folder" in fails(tmp_path)
    assert names(tmp_path) == []


def test_any_page_goes_to_a_file_or_into_a_folder(tmp_path: Path) -> None:
    assert write_page("<p>ä</p>", tmp_path, "compare.html") == tmp_path / "compare.html"
    out = write_page("<p>ä</p>", tmp_path / "new" / "a.html", "compare.html")
    assert out.read_bytes() == (tmp_path / "compare.html").read_bytes() == "<p>ä</p>".encode()
