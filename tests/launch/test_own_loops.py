"""The examples of own loops run as they stand, on one rank and on two, and resume exactly."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest

from launch.jobs import ROOT, assert_nothing_left, run
from ranks import run_ranks

pytestmark = pytest.mark.xdist_group("processes")  # needs no `reference`
EXAMPLES = ROOT / "examples"


def _example(rank: int, name: str, *arguments: str) -> list[str]:
    """Lines that this rank prints."""
    before, out = sys.argv, io.StringIO()
    sys.argv = [name, *arguments]
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
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


def test_ddp_replaced_on_one_rank() -> None:
    _losses_fall(run_ranks(1, _example, "ddp_replacement.py", "--device", "cpu")[0], 1)


def test_ddp_replaced_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    example = [str(EXAMPLES / "ddp_replacement.py"), "--device", "cpu"]
    example += ["--wire", "fp16", "--algorithm", "ring"]
    done = run([*torchrun, "--nproc-per-node", "2", *example], tmp_path)
    assert done.code == 0, done.err
    _losses_fall(done.out.splitlines(), 2)
    assert_nothing_left(tmp_path)


def _losses_fall(lines: list[str], ranks: int) -> None:
    assert [line.split(":")[0] for line in lines] == [
        f"{ranks} ranks, step 1", f"{ranks} ranks, step 20",
    ]  # fmt: skip
    first, last = (float(line.split()[-1]) for line in lines)
    assert last < first
