"""What `/proc` says of other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from paceline.core.host import StartUp, in_thread, process_age_s, process_ids, process_stat

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
        assert other.stdout is not None
        assert other.stdout.readline() == "named\n"
        stat = process_stat(other.pid)
        assert stat is not None
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
