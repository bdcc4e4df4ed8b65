"""What `/proc` says of other processes."""

from __future__ import annotations

import os
import subprocess
import sys

from paceline.core.host import process_ids, process_stat

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
