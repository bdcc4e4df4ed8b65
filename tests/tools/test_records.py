"""Records stay few, small and readable, and results fit on one page."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "records"
FOLDERS = sorted(path for path in RECORDS.iterdir() if path.is_dir())


def test_records_are_few_and_small() -> None:
    assert len(FOLDERS) <= 28
    files = [path for path in RECORDS.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(path.stat().st_size for path in files) <= 3_000_000


@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
def test_a_record_has_a_conclusion_and_data(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    assert re.search(r"^# .*\?$", text, re.M), "the title is the question"
    assert "**" in text.partition("\n")[2][:400], "the conclusion comes first"
    for line in (folder / "data.jsonl").read_text().splitlines():
        assert {"table", "data", "series"} & json.loads(line).keys()
    archive = folder / "raw.tar.xz"
    if archive.exists():
        with tarfile.open(archive) as files:
            assert files.getnames()
    names = {path.name for path in folder.iterdir()}
    assert names <= {"README.md", "data.jsonl", "raw.tar.xz"}


@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
def test_links_between_records_lead_somewhere(folder: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", (folder / "README.md").read_text()):
        assert (folder / target).exists(), target


def test_results_have_at_most_60_rows() -> None:
    rows = [
        line for line in (ROOT / "docs/results.md").read_text().splitlines() if line.startswith("|")
    ]
    data = [row for row in rows if not row.startswith(("| what |", "| --- |"))]
    assert 0 < len(data) <= 60
    assert all(re.search(r"\| \d{4}-\d\d-\d\d \|$", row) for row in data)
