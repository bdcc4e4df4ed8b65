from __future__ import annotations

from pathlib import Path

from paceline.data.file_lock import file_lock


def test_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with file_lock(path) as first:
        assert first is True
        with file_lock(path, wait=False) as second:
            assert second is False
    with file_lock(path, wait=False) as third:
        assert third is True


def test_a_place_without_locks(tmp_path: Path) -> None:
    with file_lock(tmp_path / "absent" / "lock") as held:
        assert held is None
