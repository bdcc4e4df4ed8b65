from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline.data.caching import cache_disk
from paceline.data.caching.cache_disk import DiskStore
from paceline.data.caching.cache_entry import from_entry, to_entry

LIMIT = 10_000


def files(directory: Path) -> list[Path]:
    return [p for p in (directory / "set").rglob("*") if p.is_file() and p.parent.name != "set"]


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in files(directory))


def open_store(directory: Path, limit: int = LIMIT) -> DiskStore:
    return DiskStore(directory, "set", limit)


@pytest.mark.parametrize("data", [b"", b"bytes", np.arange(60, dtype=np.uint8).reshape(4, 5, 3)])
def test_entries(data: bytes | np.ndarray) -> None:
    entry = to_entry(7, data)
    found = from_entry(7, entry)
    assert type(found) is type(data)
    assert np.array_equal(found, data) if isinstance(data, np.ndarray) else found == data
    assert from_entry(8, entry) is None
    for length in range(len(entry)):
        assert from_entry(7, entry[:length]) is None
    for at in range(len(entry)):
        assert from_entry(7, entry[:at] + bytes([entry[at] ^ 4]) + entry[at + 1 :]) is None


def test_it_outlives_its_process(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    first.put(3, b"three")
    first.close()
    second = open_store(tmp_path)
    assert second.get(3) == b"three"
    assert second.get(4) is None
    assert second.used_bytes == size(tmp_path)
    second.close()


def test_the_limit_holds_to_the_byte(tmp_path: Path) -> None:
    entry = len(to_entry(0, bytes(100)))
    store = open_store(tmp_path, 5 * entry)
    for i in range(9):
        store.put(i, bytes(100))
    assert [store.get(i) is not None for i in range(9)] == [True] * 5 + [False] * 4
    assert size(tmp_path) == store.used_bytes == 5 * entry
    store.put(2, bytes(100))  # there already: counted once
    assert store.used_bytes == 5 * entry
    store.close()


def test_a_damaged_file_is_a_miss_and_written_anew(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(1, b"good")
    path = files(tmp_path)[0]
    for damage in (b"", path.read_bytes()[:-1], b"x" * 40):
        path.write_bytes(damage)
        assert store.get(1) is None
        assert not path.exists()
        store.put(1, b"good")
        assert store.get(1) == b"good"
    assert store.damaged == 3
    store.close()


def test_what_a_crash_left_is_given_back(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(1, bytes(500))
    part = files(tmp_path)[0].with_name(".1.77.88.tmp")
    part.write_bytes(bytes(300))
    store._reserve(3000)  # and never written
    other = open_store(tmp_path)  # not alone: whoever is here may still be writing
    assert other.used_bytes == size(tmp_path) - 300 + 3000
    other.close()
    store.close()
    alone = open_store(tmp_path)
    assert not part.exists()
    assert alone.used_bytes == size(tmp_path)
    alone.close()


def test_a_full_disk_ends_the_caching_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(tmp_path)
    store.put(0, b"before")
    used = store.used_bytes

    class FullDisk(io.BytesIO):
        def write(self, content: object, /) -> int:
            raise OSError(28, "No space left on device")

    def full(part: Path) -> FullDisk:
        part.touch()
        return FullDisk()

    with monkeypatch.context() as disk:
        disk.setattr(cache_disk, "open_part", full)
        for i in range(1, 5):
            store.put(i, b"more")
    assert store.used_bytes == used
    assert store.get(0) == b"before"
    assert len(files(tmp_path)) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith("paceline: warning: the cache takes no more samples: ")
    assert told[0].endswith("cannot be written (No space left on device)")
    store.put(9, b"later")  # no second try: a disk that is full now and then would slow every read
    assert store.get(9) is None
    assert "takes no more" in store.describe()
    store.close()


WRITER = """
import sys
from pathlib import Path
from paceline.data.caching.cache_disk import DiskStore
store = DiskStore(Path(sys.argv[1]), "set", 30_000)
wrong = 0
for i in range(300):
    store.put(i, bytes([i % 256]) * 100)
    found = store.get(i)
    wrong += found is not None and found != bytes([i % 256]) * 100
print(wrong)
"""


def test_ranks_of_a_host_share_it(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE, text=True, env=environment,
        )
        for _ in range(3)
    ]  # fmt: skip
    assert [process.communicate()[0].strip() for process in started] == ["0"] * 3
    entry = len(to_entry(0, bytes(100)))
    assert size(tmp_path) == 30_000 // entry * entry
    store = open_store(tmp_path)
    assert store.used_bytes == size(tmp_path)
    assert not [p for p in files(tmp_path) if p.name.startswith(".")]
    store.close()
