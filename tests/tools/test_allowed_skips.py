from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import allowed_skips
from allowed_skips import SkipRecorder, kind_of, main, must_be_complete

pytest_plugins = ["pytester"]

TESTS = """
import pytest
@pytest.mark.skipif(True, reason="needs a CUDA device")
def test_mark(): pass
def test_body(): pytest.skip("no mpirun here: install it")
@pytest.fixture
def compiler(): pytest.skip("needs a C compiler")
def test_fixture(compiler): pass
@pytest.mark.xfail
def test_that_fails(): assert False
def test_that_passes(): pass
"""


def test_each_skip_is_recorded(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_some=TESTS, test_none="import pytest; pytest.importorskip('wandb9')")
    for _ in range(2):  # two calls of pytest add up
        pytester.inline_run("-p", "no:cacheprovider", plugins=[SkipRecorder(Path("skips.jsonl"))])
    records = [json.loads(line) for line in Path("skips.jsonl").read_text().splitlines()]
    found = {record["test"].rpartition(":")[2]: record["reason"] for record in records}
    assert len(records) == 2 * len(found) == 8
    assert found.pop("test_none.py").startswith("could not import 'wandb9'")
    assert found == {
        "test_mark": "needs a CUDA device",
        "test_body": "no mpirun here: install it",
        "test_fixture": "needs a C compiler",
    }


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("needs a CUDA device", "GPU"),
        ("could not import 'wandb': No module named 'wandb'", "optional packages"),
        ("tinyimagenet25 is not here: ../shared/data is absent", "data"),
        ("no emulated cluster here: not root: network namespaces and tc need it", "rights"),
        ("no emulated cluster here: no ip and no tc here: install iproute2", None),
        ("no region decoder here: no C compiler (cc, gcc, clang)", None),
        ("needs a C compiler", None),
        ("no mpirun", None),
        ("could not import 'onnxruntime': No module named 'onnxruntime'", None),
    ],
)
def test_what_may_be_missing(reason: str, kind: str | None) -> None:
    assert kind_of(reason) == kind


@pytest.mark.parametrize(
    ("ci", "user", "apt", "complete"),
    [
        ("true", 1000, None, True),
        ("", 0, "/usr/bin/apt-get", True),
        ("false", 0, None, False),
        ("", 1000, "/usr/bin/apt-get", False),
    ],
)
def test_a_skip_that_is_not_allowed_fails_if_all_can_be_installed(
    ci: str, user: int, apt: str | None, complete: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", lambda name: apt)
    monkeypatch.setattr(allowed_skips, "MISSING", ["echo", "openmpi-bin\ngcc"])
    assert must_be_complete() == complete
    file = tmp_path / "skips.jsonl"
    assert main(file) == 0, "nothing was skipped"
    file.write_text('{"test": "a", "reason": "needs a GPU"}\n')
    assert main(file) == 0
    file.write_text(file.read_text() + '{"test": "b", "reason": "no mpirun"}\n')
    assert main(file) == complete
    last = capsys.readouterr().out.splitlines()[-1]
    for word in ("2 tests skipped", "1 GPU", "1 for other reasons", "openmpi-bin, gcc"):
        assert word in last
    assert last.startswith("error: ") == complete
