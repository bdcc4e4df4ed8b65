"""Cores, processes, the load and the GPU connections of a host."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.core import host
from paceline.core.host import (
    NOTABLE_WAIT,
    HostLoad,
    StartUp,
    ask_for_connections,
    available_cores,
    connections,
    describe_overload,
    few_connections,
    in_thread,
    process_age_s,
    process_ids,
    process_stat,
)


def test_the_affinity_counts_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 6}, raising=False)
    assert available_cores() == 3


def test_all_cores_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert available_cores() == 7


# The kernel cuts a name at 15 bytes, here within a letter.
_NAMED = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, b"caf\\xc3\\xa9 encod \\xc3\\xa9", 0, 0, 0)
print("named", flush=True)
sys.stdin.read()
"""


def test_a_name_that_is_no_text_hides_no_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _NAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "named\n"
        stat = process_stat(other.pid)
        assert stat.parent == os.getpid()
        assert other.pid in process_ids()
        other.communicate("")


def test_the_age_of_a_process_begins_with_its_interpreter() -> None:
    code = "import time; begun = time.time(); from paceline.core.host import process_age_s as age; "
    shown = "passed = time.time() - begun; print(age(), passed)"
    found = subprocess.run(
        [sys.executable, "-c", code + shown], capture_output=True, text=True, check=True
    )
    age, passed = map(float, found.stdout.split())
    assert age >= passed - 0.02, "the kernel counts ticks of 10 ms"
    assert process_age_s() > age - passed, "this process is the older one"


def test_an_action_is_done_also_if_the_system_starts_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    in_thread(lambda: done.append(threading.current_thread().name))(100)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    in_thread(lambda: done.append(threading.current_thread().name))(100)
    assert done[0] != done[1] == "MainThread"


def test_parts_of_a_start_follow_one_another() -> None:
    moments = iter((100.0, 100.5, 102.0, 102.25))
    startup = StartUp(1.5, clock=lambda: next(moments))
    for part in ("data", "model", "data"):
        startup.end(part)
    assert startup.seconds == {"imports": 1.5, "data": 0.75, "model": 1.5}
    assert "imports" not in StartUp().seconds, "of a program, they are not known"


NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """And as it was, afterwards."""
    monkeypatch.setenv(NAME, "something")
    monkeypatch.delenv(NAME)


def drive(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """A driver that answers so."""
    driver = SimpleNamespace(cuDeviceGetCount=lambda count: status)
    monkeypatch.setattr(host.ctypes, "CDLL", lambda name: driver)


def test_asked_for_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    drive(monkeypatch, 3)
    ask_for_connections()
    assert os.environ[NAME] == "32"
    assert few_connections() == ""


def test_not_asked_for_when_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    drive(monkeypatch, 0)
    ask_for_connections()
    assert NAME not in os.environ
    assert few_connections().endswith(f"set {NAME}=32, it is 8")


@pytest.mark.parametrize("error", [OSError, AttributeError])
def test_without_a_driver_there_is_nothing_to_be_late_for(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> None:
        raise error

    monkeypatch.setattr(host.ctypes, "CDLL", load)
    ask_for_connections()
    assert connections() == "32"


def test_what_a_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "1")
    ask_for_connections()
    assert os.environ[NAME] == "1"
    assert few_connections().endswith("it is 1")


@pytest.mark.gpu
@pytest.mark.parametrize("before", ["pass", "torch.cuda.is_available()"])
def test_a_question_starts_cuda(before: str) -> None:
    script = (
        "import os, torch; from paceline.core.host import ask_for_connections as ask; "
        f"{before}; ask(); print(os.environ.get('{NAME}'))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["32" if before == "pass" else "None"]


NS = 1_000_000_000


class Accounts:
    """A made-up /proc and clock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now_s = folder, 100.0
        self.write({1: (0.0, 0.0)})

    def write(self, threads: dict[int, tuple[float, float]]) -> None:
        for number, (ran_s, waited_s) in threads.items():
            place = self.folder / "self" / "task" / str(number)
            place.mkdir(parents=True, exist_ok=True)
            (place / "schedstat").write_text(f"{int(ran_s * NS)} {int(waited_s * NS)} 7\n")

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
    accounts.write({1: (4.0, 3.0), 2: (2.0, 3.0)})
    assert load.read() == load.latest == pytest.approx(0.5)
    accounts.now_s += 10
    accounts.write({1: (10.0, 3.0), 2: (8.0, 3.0)})
    assert load.read() == 0, "each span counts for itself"


@pytest.mark.parametrize("content", ["", "a b c", "1"])
def test_a_system_without_accounts_reports_nothing(accounts: Accounts, content: str) -> None:
    (accounts.folder / "self" / "task" / "1" / "schedstat").write_text(content)
    load = accounts.load()
    accounts.now_s += 10
    assert load.read() is None
    assert load.latest is None


def test_only_an_overloaded_host_is_described() -> None:
    assert "run.threads" in describe_overload(0.6)
    assert describe_overload(0.1) == ""


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
        assert reading >= NOTABLE_WAIT
    finally:
        for pid in children:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        os.sched_setaffinity(0, before)
