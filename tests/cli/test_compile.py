"""torch.compile for real, in a process of its own: it must not change what is learnt."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from cli_runs import Done, events, small, started, summary

# Two steps of one size, so that each part is compiled once.
ARGUMENTS = small(
    "--set", "data.synthetic_samples=32", "--set", "data.image_size=12", "--epochs", "1"
)


def train(cwd: Path, how: str, fault: Any = None) -> Done:
    arguments = [*ARGUMENTS, "--output", how, "--compile", how]
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(cwd / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with started(arguments, cwd, fault, **cache) as process:
        return process.wait(250)


@pytest.mark.timeout(300)  # as long as a C++ compiler needs on a busy machine
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler: g++")
@pytest.mark.slow  # the compiler takes a minute
def test_a_compiled_run_learns_the_same(tmp_path: Path) -> None:
    for each in ("off", "model"):
        done = train(tmp_path, each)
        assert (done.code, done.err) == (0, "")
    assert "compile model" in summary(tmp_path / "model")["chosen"]["speed"]
    assert any((tmp_path / "cache").rglob("*.so")), "nothing was compiled"
    plain, ours = (load_file(tmp_path / each / "weights.safetensors") for each in ("off", "model"))
    assert plain.keys() == ours.keys()
    for name, value in plain.items():
        assert ours[name].allclose(value, rtol=1e-3, atol=1e-5), name
    losses = [
        [step["loss"] for step in events(tmp_path / each, "step")] for each in ("off", "model")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def _no_compiler() -> None:
    import torch._inductor.config as config

    config.cpp.cxx = (None, "no-such-compiler")


@pytest.mark.timeout(300)
def test_a_machine_without_a_compiler_ends_with_one_line(tmp_path: Path) -> None:
    line = train(tmp_path, "model", _no_compiler).error_line()
    assert line.startswith("torch.compile failed")
    assert "--compile off" in line
