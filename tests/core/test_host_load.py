"""Threads that wait for cores are told apart from slow compute, by Linux's own accounts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from paceline.core.host import HostLoad, LoadReading

NS = 1_000_000_000


class Accounts:
    """A made-up /proc and clock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now_s = folder, 100.0
        self.write({1: (0.0, 0.0)}, busy_s=0.0)

    def write(self, threads: dict[int, tuple[float, float]], busy_s: float) -> None:
        for number, (ran_s, waited_s) in threads.items():
            place = self.folder / "self" / "task" / str(number)
            place.mkdir(parents=True, exist_ok=True)
            (place / "schedstat").write_text(f"{int(ran_s * NS)} {int(waited_s * NS)} 7\n")
        ticks = int(busy_s * os.sysconf("SC_CLK_TCK"))
        core = min(os.sched_getaffinity(0))
        (self.folder / "stat").write_text(
            f"cpu 9 0 0 0 0 0 0 0\ncpu{core} {ticks} 0 0 50 0 0 0 0\n"
        )

    def load(self) -> HostLoad:
        return HostLoad(self.folder, lambda: self.now_s)


@pytest.fixture
def accounts(tmp_path: Path) -> Accounts:
    return Accounts(tmp_path)


def test_shares_of_a_span(accounts: Accounts) -> None:
    load = accounts.load()
    accounts.now_s += 1
    assert load.read() is None, "too soon"
    accounts.now_s += 9
    accounts.write({1: (4.0, 3.0), 2: (2.0, 3.0)}, busy_s=8.0)
    reading = load.read()
    assert reading is not None
    assert reading.waited == pytest.approx(0.5)
    assert reading.others == pytest.approx(0.8 / reading.cores, abs=0.05)
    assert load.latest == reading
    accounts.now_s += 10
    accounts.write({1: (10.0, 3.0), 2: (8.0, 3.0)}, busy_s=20.0)
    again = load.read()
    assert again is not None
    assert again.waited == 0, "each span counts for itself"
    assert not again.overloaded


@pytest.mark.parametrize("content", ["", "1 2", "a b c", "1"])
def test_a_system_without_accounts_reports_nothing(accounts: Accounts, content: str) -> None:
    (accounts.folder / "self" / "task" / "1" / "schedstat").write_text(content)
    (accounts.folder / "stat").unlink()
    load = accounts.load()
    accounts.now_s += 10
    assert load.read() is None
    assert load.latest is None


@pytest.mark.parametrize(
    ("reading", "threads", "remedy"),
    [
        (LoadReading(0.1, 0.9, 0.0, 2), 2, ""),
        (LoadReading(0.6, 0.8, 0.0, 2), 2, "set run.threads=1"),
        (LoadReading(0.6, 0.8, 0.0, 2), 1, "stop other work"),
        (LoadReading(0.6, 0.0, 0.0, 2), 64, "run.threads=2"),
        (LoadReading(0.6, 0.0, 0.0, 4), 2, "set run.threads=1"),
        (LoadReading(0.6, 0.0, 0.0, 2), 1, "data.workers"),
        (LoadReading(0.6, 0.0, 0.5, 64), 64, "run.threads to the cores"),
        (LoadReading(0.6, 0.0, 0.5, 64), 1, "raise the quota"),
    ],
)
def test_the_remedy_follows_the_cause(reading: LoadReading, threads: int, remedy: str) -> None:
    text = reading.describe(threads)
    assert remedy in text
    assert bool(text) == reading.overloaded
    assert threads > 1 or "run.threads" not in text


def test_real_threads_that_share_one_core_wait_for_it() -> None:
    """Four busy processes on one core: the system's own account shows who waits."""
    if not Path("/proc/self/task").is_dir() or not Path("/proc/self/schedstat").is_file():
        pytest.skip("needs Linux's schedstat")
    children = []
    core = {min(os.sched_getaffinity(0))}
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, core)
        for _ in range(4):
            pid = os.fork()
            if pid == 0:
                end = time.monotonic() + 30
                while time.monotonic() < end:
                    pass
                os._exit(0)
            children.append(pid)
        load = HostLoad()
        reading, end = None, time.monotonic() + 20
        while reading is None and time.monotonic() < end:
            sum(range(10_000))
            reading = load.read()
        assert reading is not None
        assert reading.overloaded, reading
        assert reading.others > 0.3
        assert "run.threads" in reading.describe(2)
    finally:
        for pid in children:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        os.sched_setaffinity(0, before)
