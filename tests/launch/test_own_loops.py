"""The examples of own loops and of DDP's hook run as they stand, on one rank and on two; each where its
library is. The launchers of these ranks are tested in `test_all_launchers.py`."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from launch.jobs import ROOT, run
from ranks import run_ranks

EXAMPLES = ROOT / "examples"


def _example(rank: int, name: str, *arguments: str) -> list[str]:
    """Lines that this rank prints."""
    before, out = sys.argv, io.StringIO()
    sys.argv = [name, *arguments]
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.argv = before
    return out.getvalue().splitlines()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_own_loop_resumes_exactly(ranks: int, tmp_path: Path) -> None:
    whole = ("own_loop.py", "--device", "cpu", "--folder", str(tmp_path / "a"), "--epochs", "3")
    straight, *silent = run_ranks(ranks, _example, *whole)
    assert silent == [[]] * (ranks - 1)
    assert [line.split(":")[0] for line in straight] == ["epoch 1", "epoch 2", "epoch 3"]
    resumed = []
    for epochs in ("1", "3"):
        part = (*whole[:4], str(tmp_path / "b"), "--epochs", epochs)
        resumed += run_ranks(ranks, _example, *part)[0]
    assert resumed == straight
    first, last = (float(line.split()[3].rstrip(",")) for line in (straight[0], straight[-1]))
    assert last < first
    assert f"{ranks} ranks" in straight[-1]


@pytest.mark.parametrize(
    ("ranks", "flags"), [(1, ()), (2, ("--wire", "fp16", "--algorithm", "ring"))]
)
def test_ddp_replaced(ranks: int, flags: tuple[str, ...]) -> None:
    lines, *_ = run_ranks(ranks, _example, "ddp_replacement.py", "--device", "cpu", *flags)
    assert [line.split(":")[0] for line in lines] == [
        f"{ranks} ranks, step 1", f"{ranks} ranks, step 20",
    ]  # fmt: skip
    first, last = (float(line.split()[-1]) for line in lines)
    assert last < first


HOOK = ("--ranks", "2", "--wire", "float16")


def test_ddps_hook() -> None:
    line, *_ = run_ranks(2, _example, "ddp_hook.py", *HOOK)[0]
    _assert_equal_weights(line)


def test_ddps_hook_starts_its_ranks_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def execute(program: str, arguments: list[str]) -> None:
        calls.append(arguments)
        raise SystemExit

    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.delenv("RANK", raising=False)
    _example(0, "ddp_hook.py", *HOOK)
    ((_, *command),) = calls
    assert command[:2] == ["-m", "torch.distributed.run"]
    options = parse_args(command[2:])
    assert options.standalone
    assert options.nproc_per_node == "2"
    assert [options.training_script, *options.training_script_args] == [
        str(EXAMPLES / "ddp_hook.py"), *HOOK,
    ]  # fmt: skip


@pytest.mark.parametrize("library", ["lightning", "accelerate"])
def test_hooks_in_other_libraries(library: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    done = run([sys.executable, str(EXAMPLES / f"{library}_hook.py"), *HOOK], tmp_path)
    assert done.code == 0, done.out + done.err
    _assert_equal_weights(done.out.splitlines()[-1])


def _assert_equal_weights(line: str) -> None:
    found = re.search(
        r"2 ranks on cpu, float16 wire: loss (.*) to (.*), (\d+) buckets, weights equal", line
    )
    assert found, line
    assert float(found[2]) < float(found[1])
    assert int(found[3]) > 0
